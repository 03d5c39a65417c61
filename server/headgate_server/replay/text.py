"""The report as text, for a terminal. Keys and routes are printed with everything escaped that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headgate_server.replay.report import Report
from headgate_server.wording import hour, moment, number, percent, printable, span

_BAR = 24
_MOST_HOURS = 72
_LONGEST = 60


def report_text(report: Report) -> str:
    """Return a replay's report as text."""
    result = report["result"]
    parts = [
        _summary(report),
        _rules(result),
        _callers(result),
        _routes(result),
        _hours(result),
        _waits(result),
        _headroom(result),
        _retries(result),
        _comparison(report),
        _unread(report["log"]),
        notes_text(report["notes"]),
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def log_text(log: Report) -> str:
    """Return in one line what was read."""
    files = len(log["files"])
    what = next(iter(log["files"])) if files == 1 else f"{files} files"
    formats = ", ".join(dict.fromkeys(log["files"].values()))
    return (
        f"{number(log['lines'])} lines of {printable(what)} ({formats}), "
        f"{moment(log['from'])} to {moment(log['to'])} UTC, {span((log['to'] or 0) - (log['from'] or 0))}"
    )


def notes_text(notes: Sequence[str]) -> Iterator[str]:
    """Yield what must be known, one note to a line."""
    if notes:
        yield "What the log cannot tell"
        yield from (f"  - {printable(note)}" for note in notes)


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table: the first column is text, the others are numbers."""
    if not rows:
        return
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    yield title
    for row in (headings, *rows):
        first, *others = row
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield f"  {first:<{widths[0]}}  {cells}".rstrip()


def cut(text: str) -> str:
    """Return such text, not too long for a table."""
    text = printable(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _summary(report: Report) -> Iterator[str]:
    result, keys = report["result"], report["result"]["keys"]
    about = "" if keys["exact"] else "about "
    yield log_text(report["log"])
    yield f"Policy: {printable(report['policy']['name'])}"
    yield from (
        f"  - {printable(rule['words'])}  [{printable(rule['name'])}]" for rule in report["policy"]["rules"]
    )
    yield ""
    yield (
        f"Would have refused {number(result['refused'])} of {number(result['requests'])} requests "
        f"({percent(result['refused_share'])}), of {about}{number(keys['refused'])} of {about}{number(keys['all'])} keys."
    )


def _rules(result: Report) -> Iterator[str]:
    rows = [
        [cut(rule["name"]), number(rule["refused"]), number(rule["refused_alone"])]
        for rule in result["rules"]
    ]
    if result["too_costly"]:
        rows.append(
            ["(cost above every capacity)", number(result["too_costly"]), number(result["too_costly"])]
        )
    yield from table("Refused by rule", ["rule", "refused", "no other rule did"], rows)
    rows = [[cut(rule["name"]), number(rule["refused"]), number(rule["asked"])] for rule in result["shadow"]]
    if rows:
        yield ""
    yield from table("Shadow rules", ["rule", "would refuse", "of admitted"], rows)


def _callers(result: Report) -> Iterator[str]:
    rows = [
        [cut(caller["key"]), number(caller["refused"]), number(caller["requests"])]
        for caller in result["worst_callers"]
    ]
    yield from table("Most refused callers", ["key", "refused", "of"], rows)


def _routes(result: Report) -> Iterator[str]:
    rows = [
        [cut(route["route"]), number(route["refused"]), number(route["refused"] + route["admitted"])]
        for route in result["routes"]
        if route["refused"]
    ]
    yield from table("Refused by route", ["route", "refused", "of"], rows)


def _hours(result: Report) -> Iterator[str]:
    hours = result["hours"]
    refused = [bin_ for bin_ in hours if bin_["refused"]]
    shown = sorted(
        sorted(refused, key=lambda bin_: -bin_["refused"])[:_MOST_HOURS], key=lambda bin_: bin_["from"]
    )
    highest = max((bin_["refused"] for bin_ in shown), default=0)
    rows = [
        [
            hour(bin_["from"]),
            number(bin_["refused"]),
            number(bin_["refused"] + bin_["admitted"]),
            f"{'#' * max(1, bin_['refused'] * _BAR // highest):<{_BAR}}",
        ]
        for bin_ in shown
    ]
    unit = "hour" if result["hour_seconds"] == 3600 else span(result["hour_seconds"])
    yield from table(
        f"Refused by {unit} (UTC; without refusals: not shown)", ["from", "refused", "of", ""], rows
    )


def _waits(result: Report) -> Iterator[str]:
    waits = result["waits"]
    if not result["refused"]:
        return
    yield "How long the refused would have had to wait"
    if any(step["refused"] for step in waits["steps"]):
        yield (
            f"  half of them up to {span(waits['p50'])}, 90 % up to {span(waits['p90'])}, "
            f"99 % up to {span(waits['p99'])}, the longest {span(waits['longest'])}"
        )
    if waits["never"]:
        yield f"  {number(waits['never'])} for ever: no waiting would admit them"


def _headroom(result: Report) -> Iterator[str]:
    room = result["headroom"]
    if not room["keys"]:
        return
    yield "Head-room of the others"
    yield (
        f"  Of {number(room['keys'])} keys that were never refused, half used at most {percent(room['p50'])} "
        f"of their limit, 90 % at most {percent(room['p90'])}, 99 % at most {percent(room['p99'])}."
    )
    near = room["steps"][-1]["keys"]
    yield f"  {number(near)} came within a tenth of it."


def _retries(result: Report) -> Iterator[str]:
    retries = result["retries"]
    if retries is None:
        return
    yield f"If the refused try again, up to {retries['tries']} times"
    mean = "" if retries["mean_wait"] is None else f", after {span(retries['mean_wait'])} on average"
    yield (
        f"  {number(retries['made'])} more requests; {number(retries['admitted'])} get through{mean}; "
        f"{number(retries['gave_up'])} give up"
    )
    if retries["not_modelled"]:
        yield f"  {number(retries['not_modelled'])} are not in the model: too many were waiting"


def _comparison(report: Report) -> Iterator[str]:
    compare = report["compare"]
    if compare is None:
        return
    changes, result = compare["changes"], compare["result"]
    yield f"Compared with {printable(compare['policy']['name'])}"
    yield from (
        f"  - {printable(rule['words'])}  [{printable(rule['name'])}]" for rule in compare["policy"]["rules"]
    )
    yield f"  It would have refused {number(result['refused'])} ({percent(result['refused_share'])})."
    yield (
        f"  {number(changes['newly_refused'])} requests would be refused that the first admits, "
        f"{number(changes['newly_admitted'])} admitted that the first refuses; "
        f"{number(changes['both_admit'] + changes['both_refuse'])} stay as they are."
    )
    for title, name in (
        ("Newly refused callers", "newly_refused_callers"),
        ("Newly admitted callers", "newly_admitted_callers"),
    ):
        rows = [[cut(caller["key"]), number(caller["requests"])] for caller in changes[name]]
        if rows:
            yield ""
        yield from table(title, ["key", "requests"], rows)
    rows = [
        [
            f"{moment(example['time'])}  {cut(example['key'])}",
            f"now {example['change']}",
            cut(example["rule"] or "-"),
        ]
        for example in changes["examples"]
    ]
    if rows:
        yield ""
    yield from table("The first changes, request by request", ["request", "", "by"], rows)


def _unread(log: Report) -> Iterator[str]:
    rows = [(bad["reason"], bad) for bad in log["bad_by_reason"]]
    if log["without_key"]["count"]:
        rows.append(("no key: the line does not say for whom to count", log["without_key"]))
    if log["other_limiters"]:
        rows.append(("recorded for another limiter", {"count": log["other_limiters"], "examples": []}))
    if rows:
        yield "Lines that were not replayed"
    for reason, bad in rows:
        yield f"  {number(bad['count'])}  {reason}"
        yield from (f"      {printable(example)}" for example in bad["examples"])
