"""Replays with known results, and their reports."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from headgate.policy import LimiterPolicy, parse_policy
from headgate_server.replay import (
    LogCounts,
    LoggedRequest,
    ReplayError,
    Simulation,
    make_report,
    needs_key,
    report_text,
    run,
    scopes_of,
)
from headgate_server.replay.page import report_page

SECOND = 1_000_000
START = 1_714_564_800 * SECOND
HOSTILE = "<script>alert(1)</script>\x1b[2J'\"&"


def policy(text: str) -> LimiterPolicy:
    return parse_policy(f"[limiters.api]\n{text}\n").limiters["api"]


def logged(
    times: list[float], key: str = "a", route: str | None = "GET /a", cost: int = 1, first: int = 0
) -> list[LoggedRequest]:
    return [
        LoggedRequest(START + round(time * SECOND), first + order, key, key, cost, None, route, False)
        for order, time in enumerate(times)
    ]


def replayed(
    requests: list[LoggedRequest], *texts: str, tries: int = 0, counts: LogCounts | None = None
) -> Any:
    counts = LogCounts(lines=len(requests), formats={"access.log": "combined"}) if counts is None else counts
    simulations = [Simulation(policy(text), tries) for text in texts]
    names = [f"api of {number}.toml" for number, _ in enumerate(texts)]
    return make_report(run(sorted(requests), simulations, counts), counts, names, 50_000)


def test_known_results() -> None:
    requests = logged([0, 0.1, 0.2, 0.3, 3600, 3600.5]) + logged([0.5, 4000], "b", "GET /b", first=100)
    result = replayed(requests, 'rules = ["2/minute"]')["result"]
    assert (result["requests"], result["admitted"], result["refused"]) == (8, 6, 2)
    assert result["refused_share"] == 0.25
    assert result["keys"] == {"all": 2, "refused": 1, "exact": True}
    assert result["worst_callers"] == [{"key": "a", "refused": 2, "requests": 6}]
    assert result["routes"] == [
        {"route": "GET /a", "admitted": 4, "refused": 2},
        {"route": "GET /b", "admitted": 2, "refused": 0},
    ]
    assert result["hours"] == [
        {"from": 1_714_564_800, "admitted": 3, "refused": 2},
        {"from": 1_714_568_400, "admitted": 3, "refused": 0},
    ]
    (rule,) = result["rules"]
    assert (rule["refused"], rule["refused_alone"]) == (2, 2)
    # A bucket of a second counts to its end.
    assert result["waits"]["longest"] == pytest.approx(60.8, abs=0.1)
    assert result["headroom"] == {"keys": 1, "p50": 0.5, "p90": 0.5, "p99": 0.5, "near": 0}
    assert result["timeline"]["seconds"] == 60
    assert result["timeline"]["bins"] == [
        [1_714_564_800, 3, 2],
        [1_714_568_400, 2, 0],
        [1_714_568_760, 1, 0],
    ]


def test_waits_are_exact() -> None:
    result = replayed(logged([0, 0.1]), 'rules = [{ quota = "1/hour", kind = "sliding_log" }]')["result"]
    assert {result["waits"][figure] for figure in ("p50", "p99", "longest")} == {3599.9}


def test_a_refusal_is_counted_for_every_refusing_rule() -> None:
    result = replayed(logged([0, 0, 0, 0]), 'rules = ["1/second", "2/minute"]')["result"]
    by_name = {rule["name"]: (rule["refused"], rule["refused_alone"]) for rule in result["rules"]}
    assert by_name == {"per-second": (3, 3), "per-minute": (0, 0)}
    result = replayed(logged([0, 2, 4, 4]), 'rules = ["1/second", "2/minute"]')["result"]
    assert {rule["name"]: (rule["refused"], rule["refused_alone"]) for rule in result["rules"]} == {
        "per-second": (0, 0),
        "per-minute": (2, 2),
    }


def test_concurrent_rules_are_skipped() -> None:
    places = '{ kind = "concurrent", quota = 1, lease = "1m"'
    report = replayed(
        logged([0, 0]),
        f'rules = [{places}, name = "p" }}, "1/minute", {places}, name = "s", shadow = true }}]',
    )
    assert (report["result"]["refused"], len(report["result"]["rules"])) == (1, 1)
    assert any(note.startswith("Skipped rules: p, s.") for note in report["notes"])
    with pytest.raises(ReplayError, match="not replayed"):
        replayed(logged([0]), f"rules = [{places} }}]")


def test_shadow_rules_refuse_nothing_and_are_counted() -> None:
    rules = 'rules = ["9/second", { quota = "2/second", name = "s", shadow = true }]'
    result = replayed(logged([0] * 5), rules)["result"]
    assert result["refused"] == 0
    assert [(rule["asked"], rule["refused"]) for rule in result["shadow"]] == [(5, 3)]


def test_memory_holds_only_live_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten keys per second, each live for a second and a bucket; expired keys are dropped.
    monkeypatch.setattr("headgate_server.replay.simulation.MAX_KEYS", 100)
    simulation = Simulation(policy('rules = ["5/second"]'))
    for number in range(20_000):
        simulation.decide(logged([number / 10], f"key-{number}")[0])
    assert simulation.overflowed == 0


def test_requests_that_find_memory_full_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate_server.replay.simulation.MAX_KEYS", 100)
    requests = [logged([0], f"key-{number}")[0] for number in range(150)]
    notes = replayed(requests, 'rules = ["5/second"]')["notes"]
    assert any(note.startswith("Memory was full for") for note in notes)


@pytest.mark.parametrize(
    ("text", "scopes", "keyed"),
    [
        ('rules = ["5/second"]', (), True),
        ('rules = [{ quota = "5/second", scope = "*" }]', (), False),
        (
            """rules = [{ quota = "5/second", scope = "user" }, { quota = "5/second", scope = "*" },
            { quota = "1/s", scope = "ip", shadow = true }]""",
            ("user", "ip"),
            True,
        ),
    ],
)
def test_scopes_of_a_limiter(text: str, scopes: tuple[str, ...], keyed: bool) -> None:
    assert scopes_of(policy(text)) == scopes
    assert needs_key(policy(text)) is keyed


def test_a_cost_above_the_capacity_is_never_admitted() -> None:
    result = replayed(logged([0], cost=9), 'rules = ["5/second"]')["result"]
    assert (result["refused"], result["too_costly"], result["waits"]["never"]) == (1, 1, 1)
    result = replayed(logged([0]), 'rules = ["0/second"]')["result"]
    assert (result["refused"], result["too_costly"], result["waits"]["never"]) == (1, 0, 1)


def test_a_comparison_is_request_by_request() -> None:
    requests = logged([0, 0, 0, 10, 10, 10])
    report = replayed(requests, 'rules = ["2/second"]', 'rules = ["3/minute"]')
    changes = report["compare"]["changes"]
    assert (changes["both_admit"], changes["newly_admitted"]) == (2, 1)
    assert (changes["newly_refused"], changes["both_refuse"]) == (2, 1)
    assert changes["newly_refused_callers"] == [{"key": "a", "requests": 2}]
    assert [(example["change"], example["time"] % 60) for example in changes["examples"]] == [
        ("admitted", 0),
        ("refused", 10),
        ("refused", 10),
    ]
    assert "2 requests would be newly refused, 1 newly admitted; 3 unchanged." in report_text(report)


def test_retries_follow_the_wait_and_have_separate_figures() -> None:
    result = replayed(logged([0, 0, 0]), 'rules = [{ quota = "1/second", kind = "sliding_log" }]', tries=3)[
        "result"
    ]
    assert (result["requests"], result["refused"]) == (3, 2)
    # One is admitted after a second, the other is refused again and admitted after two.
    assert result["retries"] == {
        "tries": 3,
        "made": 3,
        "admitted": 2,
        "gave_up": 0,
        "mean_wait": 1.5,
    }


def test_retries_end() -> None:
    result = replayed(logged([0] * 5), 'rules = [{ quota = "1/second", kind = "sliding_log" }]', tries=1)[
        "result"
    ]
    assert (result["retries"]["made"], result["retries"]["admitted"], result["retries"]["gave_up"]) == (
        4,
        1,
        3,
    )
    result = replayed(logged([0]), 'rules = ["0/second"]', tries=5)["result"]
    assert (result["retries"]["made"], result["retries"]["gave_up"]) == (0, 1)


def test_retries_take_units_from_later_requests() -> None:
    rule = 'rules = [{ quota = "1/second", kind = "sliding_log" }]'
    alone = replayed(logged([0, 0, 1.5]), rule)["result"]
    with_retries = replayed(logged([0, 0, 1.5]), rule, tries=1)["result"]
    assert (alone["refused"], with_retries["refused"]) == (1, 2)


def test_a_key_that_does_not_fit_is_counted() -> None:
    counts = LogCounts()
    request = logged([0])[0]._replace(key={"user": "1"})
    run([request], [Simulation(policy('rules = ["1/second"]'))], counts)
    bad = counts.bad["the limiter cannot decide it"]
    assert bad.count == 1
    assert bad.examples[0].startswith("user=1: the rules have no scope")


def test_figures_of_keys_and_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_KEYS", "MOST_ROUTES"):
        monkeypatch.setattr(f"headgate_server.replay.tally.{name}", 100)
    requests = [
        LoggedRequest(
            START + number, number, f"k{number // 2}", f"k{number // 2}", 1, None, f"/{number}", False
        )
        for number in range(5_000)
    ]
    report = replayed(requests, 'rules = ["1/minute"]')
    result = report["result"]
    assert result["refused"] == 2_500
    assert result["keys"] == {"all": 100, "refused": 100, "exact": False}
    assert any("only the first" in note for note in report["notes"])
    assert result["routes"][0]["route"] == "(other routes)"
    assert "from at least 100 of at least 100 keys" in report_text(report)


def test_a_long_log_has_a_chart_of_bounded_size() -> None:
    timeline = replayed(logged([float(minute * 60) for minute in range(1_000)]), 'rules = ["1/hour"]')[
        "result"
    ]["timeline"]
    assert timeline["seconds"] == 360
    assert len(timeline["bins"]) == 167
    assert sum(admitted + refused for _, admitted, refused in timeline["bins"]) == 1_000


def test_the_report_lists_limitations() -> None:
    counts = LogCounts(lines=3, formats={"a": "combined"}, was_refused=7, too_late=4)
    counts.problems.append("a: reading ended early: it is cut off")
    notes = "\n".join(replayed(logged([0, 1]), 'rules = ["1/minute"]', counts=counts)["notes"])
    for words in (
        "reading ended early",
        "4 lines were skipped",
        "whole seconds",
        "7 requests of the log were refused in reality",
        "--model-retries",
        "Requests before the log are unknown",
    ):
        assert words in notes
    finer = replayed(logged([0, 0.5]), 'rules = ["1/minute"]', tries=2)
    notes = "\n".join(finer["notes"])
    assert "whole seconds. Requests" not in notes
    assert "Retries are a model" in notes


def full_report() -> Any:
    counts = LogCounts(lines=9, formats={"access.log": "combined"})
    counts.add_bad("not JSON", "access.log:4", HOSTILE)
    requests = (
        logged([0, 0.5, 1], HOSTILE, HOSTILE) + logged([0, 7200], "b", first=50) + logged([3], "c", cost=50)
    )
    return replayed(
        requests,
        'rules = ["1/minute", { quota = "1/hour", name = "s", shadow = true }]',
        'rules = ["2/minute"]',
        tries=1,
        counts=counts,
    )


def test_the_text_has_every_section_and_no_control_characters() -> None:
    text = report_text(full_report())
    for words in (
        "Would have refused 3 of 6 requests (50.0 %), from 2 of 3 keys.",
        "Refused by rule",
        "Shadow rules",
        "Most refused callers",
        "Refused by route",
        "Refused by hour",
        "Waiting time of refused requests",
        "Usage of keys that were never refused",
        "If refused callers retry up to 1 times",
        "Compared with api of 1.toml",
        "Newly admitted callers",
        "First changed requests",
        "Skipped lines",
        "1  not JSON",
        "access.log:4: <script>",
        "Limitations",
    ):
        assert words in text
    assert "\x1b" not in text


class Tags(HTMLParser):
    """Collects the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_has_no_external_references() -> None:
    page = report_page(full_report())
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert "script" not in tags.seen
    assert all(reference.startswith("data:") for reference in tags.references)
    assert "url(http" not in page
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_log_without_refusals_has_a_short_report() -> None:
    report = replayed(logged([0, 100]), 'rules = ["1/minute"]')
    text = report_text(report)
    assert "Would have refused 0 of 2 requests (0 %), from 0 of 1 keys." in text
    assert "Most refused callers" not in text
    assert "Waiting time" not in text
    assert "refusals over time" in report_page(report)
