"""Requests of log files in the order of time, with counts of skipped lines."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_server.replay import LogCounts, LoggedRequest, LogSource, ReplayError, Selection, read_requests
from headgate_server.replay.recording import record_line
from headgate_server.replay.requests import in_order
from headgate_server.replay.sources import LONGEST_LINE


def line(second: int, client: str = "192.0.2.1", path: str = "/a", status: int = 200) -> str:
    time = f"01/May/2024:12:{second // 60:02}:{second % 60:02} +0000"
    return f'{client} - - [{time}] "GET {path} HTTP/1.1" {status} 9 "-" "-"\n'


def read(*logs: Path | str, counts: LogCounts | None = None, **options: object) -> list[LoggedRequest]:
    selection = Selection(**options)  # type: ignore[arg-type]
    counts = LogCounts() if counts is None else counts
    sources = [LogSource(str(log)) for log in logs]
    try:
        return list(read_requests(sources, selection, counts))
    finally:
        for source in sources:
            source.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "access.log"
    file.write_text(line(0) + line(1, "2001:db8::5", "/items/7?x=1", 429) + line(2), encoding="utf-8")
    return file


def test_requests_have_time_key_and_route(log: Path) -> None:
    counts = LogCounts()
    first, second, _ = read(log, counts=counts)
    assert (first.at, first.key, first.caller, first.cost, first.tier) == (
        1_714_564_800_000_000,
        "192.0.2.1",
        "192.0.2.1",
        1,
        None,
    )
    assert (second.key, second.route, second.was_refused) == ("2001:db8::/64", "GET /items/:id", True)
    assert (counts.lines, counts.was_refused, counts.bad) == (3, 1, {})
    assert counts.formats == {str(log): "combined"}


def test_logs_compressed_with_gzip(log: Path) -> None:
    plain, text = read(log), log.read_bytes()
    log.with_name("a.gz").write_bytes(gzip.compress(text[:200]) + gzip.compress(text[200:]))
    log.with_name("without-an-ending").write_bytes(gzip.compress(text))
    for name in ("a.gz", "without-an-ending"):
        assert [request.at for request in read(log.with_name(name))] == [request.at for request in plain], (
            name
        )


def test_a_log_compressed_with_zstd_is_an_error_with_a_command(log: Path) -> None:
    log.write_bytes(b"\x28\xb5\x2f\xfd" + b"packed")
    with pytest.raises(
        ReplayError, match=r"compressed with zstd: use `zstd -dc .*access\.log \| headgate replay -`"
    ):
        read(log)


def test_a_corrupt_archive_is_read_up_to_the_error(log: Path) -> None:
    text = b"".join(line(second % 3600, f"192.0.2.{second % 250}").encode() for second in range(30_000))
    packed = gzip.compress(text)
    broken = bytearray(packed[: len(packed) * 3 // 4])
    broken[-300:-200] = b"\xff" * 100
    log.write_bytes(bytes(broken))
    counts = LogCounts()
    requests = read(log, counts=counts)
    assert 0 < len(requests) < 30_000
    assert [problem for problem in counts.problems if "reading ended early" in problem]


def test_several_files_are_merged_by_time(tmp_path: Path) -> None:
    text, rows = tmp_path / "a.log", tmp_path / "b.jsonl"
    text.write_text(line(0) + line(2) + line(4), encoding="utf-8")
    rows.write_text(
        "".join(
            json.dumps({"ts": 1_714_564_800 + second, "request": {"client_ip": "192.0.2.9"}}) + "\n"
            for second in (1, 2, 3)
        ),
        encoding="utf-8",
    )
    requests = read(text, rows)
    assert [(request.at // 1_000_000 % 60, request.key) for request in requests] == [
        (0, "192.0.2.1"),
        (1, "192.0.2.9"),
        (2, "192.0.2.1"),
        (2, "192.0.2.9"),
        (3, "192.0.2.9"),
        (4, "192.0.2.1"),
    ]


def test_invalid_lines_are_counted_with_examples(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    noise = [
        "garbage\n",
        line(0).replace("May", "Foo"),
        line(0).replace("192.0.2.1", "-"),
        "\n",
        "x" * (LONGEST_LINE + 5) + "\n",
        "\x00\xff\n",
    ]
    log.write_bytes("".join([line(0), *noise, line(1)]).encode("latin-1"))
    counts = LogCounts()
    assert len(read(log, counts=counts)) == 2
    assert counts.lines == 8
    assert {reason: bad.count for reason, bad in counts.bad.items()} == {
        "does not match the format combined": 2,
        "invalid time": 1,
        f"longer than {LONGEST_LINE:,} bytes": 1,
        "no key: a field of the key is missing": 1,
    }
    assert counts.bad["does not match the format combined"].examples == [
        f"{log}:2: garbage",
        f"{log}:7: \x00\\xff",
    ]


def test_examples_are_few_and_short(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text(line(0) + ("y" * 100_000 + "\n") * 10, encoding="utf-8")
    counts = LogCounts()
    read(log, counts=counts)
    bad = counts.bad["does not match the format combined"]
    assert bad.count == 10
    assert len(bad.examples) == 3
    assert max(map(len, bad.examples)) < 400


def test_a_long_line_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with log.open("wb") as file:
        file.write(line(0).encode())
        for _ in range(64):
            file.write(b"z" * LONGEST_LINE)
    counts = LogCounts()
    tracemalloc.start()
    try:
        assert len(read(log, counts=counts)) == 1
        assert tracemalloc.get_traced_memory()[1] < 8 * LONGEST_LINE
    finally:
        tracemalloc.stop()
    assert sum(bad.count for bad in counts.bad.values()) == 1


def test_long_keys_are_shortened_and_stay_different(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text("".join(f"{second},{'k' * 5_000}{second}\n" for second in (1, 2)), encoding="utf-8")
    first, second = read(log, format="csv:time,client", key="{client}")
    assert first.key != second.key
    assert len(first.caller) < 128


def test_lines_with_an_invalid_cost_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text(
        "time,client,bytes\n1,a,-\n2,a,1.5\n3,a,-4\n4,a,99999999999999999999\n5,a,3\n", encoding="utf-8"
    )
    counts = LogCounts()
    assert [request.cost for request in read(log, cost="{bytes}", counts=counts)] == [3]
    assert {reason: bad.count for reason, bad in counts.bad.items()} == {
        "no cost": 1,
        "the cost is not a whole number": 3,
    }
    with pytest.raises(ReplayError, match="--cost is a whole number"):
        read(log, cost="many")


def test_keys_by_scope(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text("time,client,user\n1,a,u1\n2,a,\n", encoding="utf-8")
    counts = LogCounts()
    (request,) = read(log, named_scopes=("user", "ip"), scopes={"user": "{user}"}, counts=counts)
    assert request.key == {"user": "u1", "ip": "a"}
    assert request.caller == "user=u1, ip=a"
    assert {reason: bad.count for reason, bad in counts.bad.items()} == {
        "no key: a field of the key is missing": 1
    }


def test_shared_rules_need_no_key(tmp_path: Path) -> None:
    log = tmp_path / "a.csv"
    log.write_text("time,client\n1,\n", encoding="utf-8")
    (request,) = read(log, needs_key=False)
    assert (request.key, request.caller) == (None, "(all callers)")


def test_recorded_lines(tmp_path: Path) -> None:
    log = tmp_path / "trace.jsonl"
    lines = [
        record_line(5, "api", "hit", "alice", 2, "pro", True),
        record_line(6, "api", "hold", b"\xff", 1, None, False),
        record_line(7, "api", "hit", {"user": "42", "ip": b"\x01"}, 1, None, True),
        record_line(8, "other", "hit", "alice", 1, None, True),
        record_line(9, "api", "check", "alice", 1, None, True),
        record_line(10, "api", "hit", None, 1, None, True),
        '{"headgate": 1, "at": "x", "limiter": "api", "key": "alice"}',
        '{"headgate": 1, "at": 3, "limiter": "api", "key": 7}',
        '{"headgate": 1, "at": 3, "limiter": "api", "key": {"hex": "zz"}}',
        '{"headgate": 1, "at": 3, "limiter": "api", "key": "a", "cost": -1}',
        '{"headgate": 1, "at": 3, "limiter": "api", "key": "a", "tier": 1}',
    ]
    log.write_text("\n".join(lines), encoding="utf-8")
    counts = LogCounts()
    requests = read(log, limiter="api", counts=counts)
    assert [(r.at, r.key, r.cost, r.tier, r.was_refused) for r in requests] == [
        (5, "alice", 2, "pro", False),
        (6, b"\xff", 1, None, True),
        (7, {"user": "42", "ip": b"\x01"}, 1, None, False),
        (10, None, 1, None, False),
    ]
    assert {reason: bad.count for reason, bad in counts.bad.items()} == {
        "recorded for another limiter": 1,
        "recorded for an operation without a decision": 1,
        "invalid time": 1,
        "invalid key": 2,
        "the cost is not a whole number": 1,
        "the tier is not text": 1,
    }
    with pytest.raises(ReplayError, match="remove --key"):
        read(log, key="{client}")


def at_times(*times: int) -> Iterator[LoggedRequest]:
    return (LoggedRequest(at, order, "k", "k", 1, None, None, False) for order, at in enumerate(times))


def test_lines_that_are_too_late_are_skipped_and_counted() -> None:
    counts = LogCounts()
    assert [r.at for r in in_order(at_times(10, 20, 30, 5, 40), 1, counts)] == [10, 20, 30, 40]
    assert counts.too_late == 1


def test_a_time_in_the_far_future_makes_no_other_line_late() -> None:
    counts = LogCounts()
    times = [1, 2, 10**15, *range(3, 200)]
    assert [r.at for r in in_order(at_times(*times), 4, counts)] == [*range(1, 200), 10**15]
    assert counts.too_late == 0


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 20))
def test_every_request_is_sorted_or_counted(times: list[int], room: int) -> None:
    counts = LogCounts()
    out = list(in_order(at_times(*times), room, counts))
    assert [(r.at, r.order) for r in out] == sorted((r.at, r.order) for r in out)
    assert len(out) + counts.too_late == len(times)
    if len(times) <= room:
        assert counts.too_late == 0
