"""The list of mutations, and the tool that tries them. That every one is noticed is what `make mutate` finds out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import mutate
from tools.mutate import Mutation

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = mutate.load()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.why)
def test_every_mutation_applies_and_changes_something(mutation: Mutation) -> None:
    """If the code has changed, so must tools/mutations.toml."""
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    broken = mutation.applied_to(text)
    assert broken is not None, f"{mutation.path} does not contain exactly once: {mutation.old!r}"
    assert broken != text
    compile(broken, str(mutation.path), "exec")
    assert mutation.tests.split()[0].startswith("tests/")
    assert (ROOT / mutation.tests.split()[0]).is_file()


def test_there_are_enough_of_them_and_no_two_are_the_same() -> None:
    assert (
        len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
    )


def test_no_mutation_is_about_generated_code() -> None:
    assert not [mutation for mutation in MUTATIONS if mutation.file.startswith("_sync")]


SAMPLE = "tests/unit/test_clock.py -k rounded"


def broken(new: str, old: str = "return round(seconds * MICROSECONDS)") -> Mutation:
    return Mutation("clock.py", old, new, "for this test", SAMPLE)


@pytest.mark.parametrize(
    ("mutation", "fate"),
    [
        (broken("return int(seconds * MICROSECONDS)"), "killed"),
        (broken("return round(MICROSECONDS * seconds)"), "survived"),
        (broken("return 5", old="return what is not there"), "does not apply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mutation_is_killed_survives_or_does_not_apply(mutation: Mutation, fate: str) -> None:
    before = (ROOT / mutation.path).read_bytes()
    assert mutate.try_out(mutation, patience=60).fate == fate
    assert (ROOT / mutation.path).read_bytes() == before, "it must never be made in place"


def test_a_mutation_of_the_async_side_breaks_the_sync_side_too() -> None:
    mutation = Mutation("_async/limiter.py", "if self._owns_store:", "if False:", "for this test", SAMPLE)
    with mutate.copied_source() as copy:
        text = mutation.applied_to((ROOT / mutation.path).read_text())
        assert text is not None
        (copy / mutation.path).write_text(text)
        mutate.write_sync_side(copy)
        assert "if False:" in (copy / "src" / "headgate" / "_sync" / "limiter.py").read_text()


def test_tests_that_fail_anyway_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "fails", lambda *_: True)
    with pytest.raises(SystemExit, match="fails without any mutation"):
        mutate.measured(MUTATIONS[:1])


def test_the_exit_code_says_whether_all_were_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"killed": 0, "survived": 1, "does not apply": 1}
    monkeypatch.setattr(mutate, "measured", lambda chosen: {mutation.tests: 1.0 for mutation in chosen})
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--jobs=1", "a clock set back"])
    for fate, code in outcomes.items():
        monkeypatch.setattr(
            mutate, "try_out", lambda mutation, patience, fate=fate: mutate.Outcome(mutation, fate, 0.0)
        )
        assert mutate.main() == code
        assert "mutations killed in" in capsys.readouterr().out


def test_a_mutation_that_nobody_has_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", "what nobody has written"])
    with pytest.raises(SystemExit, match="no mutation is about 'what nobody has written'"):
        mutate.main()
