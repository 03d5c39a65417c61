"""The report of a replay: a JSON document, its sections for text and HTML, and its text.

Sections are created from the document only. Control characters in keys and names are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headgate import Rule
from headgate.clock import MICROSECONDS
from headgate.policy import in_words
from headgate_server.formatting import hour, moment, number, percent, printable, span
from headgate_server.replay.requests import LogCounts
from headgate_server.replay.simulation import Replayed
from headgate_server.replay.tally import MOST_KEYS

VERSION = 1

_BAR = 24
_MOST_HOURS = 72
_LONGEST = 60

Report = dict[str, Any]
"""The document; docs/how-to/replay.md describes its fields."""


def make_report(replayed: Replayed, counts: LogCounts, policies: Sequence[str], buffer: int) -> Report:
    """Return the report of a replay.

    Args:
        replayed: The finished replay.
        counts: Counts of the lines that were read.
        policies: The name of each policy: the limiter and its file.
        buffer: Size of the sorting buffers, in lines.
    """
    first, *others = replayed.simulations
    compare = None
    if others and replayed.changes is not None:
        compare = {
            "policy": _policy(others[0].policy.rules, policies[1]),
            "result": others[0].as_json(),
            "changes": replayed.changes.as_json(),
        }
    return {
        "headgate_replay": VERSION,
        "log": log_figures(counts, replayed.first, replayed.last),
        "policy": _policy(first.policy.rules, policies[0]),
        "result": first.as_json(),
        "compare": compare,
        "notes": _notes(replayed, counts, buffer),
    }


def log_figures(counts: LogCounts, first: int | None, last: int) -> Report:
    """Return the figures of the logs that were read."""
    bad = sorted(counts.bad.items(), key=lambda item: -item[1].count)
    return {
        "files": counts.formats,
        "lines": counts.lines,
        "from": None if first is None else first / MICROSECONDS,
        "to": None if first is None else last / MICROSECONDS,
        "bad": sum(lines.count for _, lines in bad),
        "bad_by_reason": [
            {"reason": reason, "count": lines.count, "examples": lines.examples} for reason, lines in bad
        ],
        "too_late": counts.too_late,
        "without_zone": counts.without_zone,
        "was_refused": counts.was_refused,
        "problems": counts.problems,
    }


def _notes(replayed: Replayed, counts: LogCounts, buffer: int) -> list[str]:
    """Return the limitations that apply to this replay."""
    notes = list(counts.problems)
    if counts.too_late:
        notes.append(
            f"{counts.too_late:,} lines were skipped, because their order could not be restored within {buffer:,} lines. "
            f"Pass consecutive logs as separate files, or raise --buffer."
        )
    if counts.without_zone:
        notes.append(f"{counts.without_zone:,} times have no time zone and were read as UTC.")
    if replayed.whole_seconds:
        notes.append(
            "All times in the log are whole seconds. Requests of one second are decided in the order of their lines, as if "
            "they arrived at its start; rules with a period of a second or less look stricter than they are."
        )
    if counts.was_refused:
        notes.append(
            f"{counts.was_refused:,} requests of the log were refused in reality. If their callers retried, these retries "
            f"are in the log too."
        )
    retries = replayed.simulations[0].retries
    if retries is None:
        notes.append(
            "Callers react to refusals: they retry, slow down or give up. The log does not contain this; --model-retries "
            "shows one possibility."
        )
    else:
        notes.append(
            f"Retries are a model: a refused caller retries after the wait, in whole seconds, at most {retries.tries} "
            f"times. Retries have separate figures, but take units like other requests."
        )
    notes.append(
        "Requests before the log are unknown, so each rule admits more than in reality during its first period. Changes of "
        "the server's clock during the log shift its times."
    )
    for simulation in replayed.simulations:
        if simulation.skipped:
            notes.append(
                f"Skipped rules: {', '.join(simulation.skipped)}. Concurrent rules are not replayed, because most "
                f"logs do not have the duration of requests."
            )
        if simulation.overflowed:
            notes.append(
                f"Memory was full for {simulation.overflowed:,} requests, which shared one count; the figures "
                f"are too strict."
            )
    if not replayed.simulations[0].tally.follows_all_keys:
        notes.append(
            f"Figures of keys include only the first {MOST_KEYS:,} keys. Requests, rules and hours are exact."
        )
    return notes


def _policy(rules: Sequence[Rule], name: str) -> Report:
    return {"name": name, "rules": [{"name": rule.name, "words": in_words(rule)} for rule in rules]}


class Section(NamedTuple):
    """A section of the report: sentences, or a table with text in the first column and numbers in the others."""

    name: str
    title: str
    lines: Sequence[str] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def report_text(report: Report) -> str:
    """Return a replay's report as text."""
    return "\n\n".join("\n".join(part) for part in (_summary(report), *map(_section_text, sections(report))))


def sections(report: Report) -> Iterator[Section]:
    """Yield the sections of a report that are not empty."""
    result, changes = report["result"], (report["compare"] or {}).get("changes")
    for section in (
        _rules(result),
        _shadow(result),
        _callers(result),
        _routes(result),
        _hours(result),
        _waits(result),
        _headroom(result),
        _retries(result),
        *([] if changes is None else [_comparison(report), *_changes(changes)]),
        _unread(report["log"]),
        Section("notes", "Limitations", [f"- {printable(note)}" for note in report["notes"]]),
    ):
        if section.lines or section.rows:
            yield section


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with text in the first column and numbers in the others."""
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    yield title
    for row in (headings, *rows):
        first, *others = row
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield f"  {first:<{widths[0]}}  {cells}".rstrip()


def rule_lines(policy: Report) -> Iterator[str]:
    """Yield the rules of a policy."""
    yield from (f"- {printable(rule['words'])}  [{printable(rule['name'])}]" for rule in policy["rules"])


def keys_text(result: Report) -> tuple[str, str]:
    """Return the numbers of refused keys and of all keys."""
    keys = result["keys"]
    at_least = "" if keys["exact"] else "at least "
    return f"{at_least}{number(keys['refused'])}", f"{at_least}{number(keys['all'])}"


def _summary(report: Report) -> Iterator[str]:
    result, log = report["result"], report["log"]
    what = next(iter(log["files"])) if len(log["files"]) == 1 else f"{len(log['files'])} files"
    formats = ", ".join(dict.fromkeys(log["files"].values()))
    refused_keys, all_keys = keys_text(result)
    yield (
        f"{number(log['lines'])} lines of {printable(what)} ({formats}), "
        f"{moment(log['from'])} to {moment(log['to'])} UTC, {span((log['to'] or 0) - (log['from'] or 0))}"
    )
    yield f"Policy: {printable(report['policy']['name'])}"
    yield from (f"  {line}" for line in rule_lines(report["policy"]))
    yield ""
    yield (
        f"Would have refused {number(result['refused'])} of {number(result['requests'])} requests "
        f"({percent(result['refused_share'])}), from {refused_keys} of {all_keys} keys."
    )


def _section_text(section: Section) -> Iterator[str]:
    if section.rows:
        yield from table(section.title, section.headings, section.rows)
    else:
        yield section.title
        yield from (f"  {line}" for line in section.lines)


def _cut(text: str) -> str:
    """Return text for a table: escaped and shortened."""
    text = printable(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _rules(result: Report) -> Section:
    rows = [
        [_cut(rule["name"]), number(rule["refused"]), number(rule["refused_alone"])]
        for rule in result["rules"]
    ]
    if result["too_costly"]:
        costly = number(result["too_costly"])
        rows.append(["(cost above the capacity)", costly, costly])
    return Section("rules", "Refused by rule", (), ("rule", "refused", "by this rule only"), rows)


def _shadow(result: Report) -> Section:
    rows = [[_cut(rule["name"]), number(rule["refused"]), number(rule["asked"])] for rule in result["shadow"]]
    return Section("shadow", "Shadow rules", (), ("rule", "would refuse", "of admitted"), rows)


def _callers(result: Report) -> Section:
    rows = [
        [_cut(caller["key"]), number(caller["refused"]), number(caller["requests"])]
        for caller in result["worst_callers"]
    ]
    return Section("callers", "Most refused callers", (), ("key", "refused", "of"), rows)


def _routes(result: Report) -> Section:
    rows = [
        [_cut(route["route"]), number(route["refused"]), number(route["refused"] + route["admitted"])]
        for route in result["routes"]
        if route["refused"]
    ]
    return Section("routes", "Refused by route", (), ("route", "refused", "of"), rows)


def _hours(result: Report) -> Section:
    worst = sorted(result["hours"], key=lambda each: -each["refused"])[:_MOST_HOURS]
    shown = sorted((each for each in worst if each["refused"]), key=lambda each: each["from"])
    highest = max((each["refused"] for each in shown), default=0)
    rows = [
        [
            hour(each["from"]),
            number(each["refused"]),
            number(each["refused"] + each["admitted"]),
            f"{'#' * max(1, each['refused'] * _BAR // highest):<{_BAR}}",
        ]
        for each in shown
    ]
    title = "Refused by hour (UTC, only hours with refusals)"
    return Section("hours", title, (), ("from", "refused", "of", ""), rows)


def _waits(result: Report) -> Section:
    waits, lines = result["waits"], []
    if waits["longest"]:
        lines.append(
            f"50 % up to {span(waits['p50'])}, 90 % up to {span(waits['p90'])}, "
            f"99 % up to {span(waits['p99'])}, longest {span(waits['longest'])}"
        )
    if waits["never"]:
        lines.append(f"{number(waits['never'])} would never be admitted")
    return Section("waits", "Waiting time of refused requests", lines)


def _headroom(result: Report) -> Section:
    room, lines = result["headroom"], []
    if room["keys"]:
        lines = [
            (
                f"{number(room['keys'])} keys were never refused. 50 % of them used at most {percent(room['p50'])} "
                f"of their limit, 90 % at most {percent(room['p90'])}, 99 % at most {percent(room['p99'])}."
            ),
            f"{number(room['near'])} of them used more than 90 %.",
        ]
    return Section("headroom", "Usage of keys that were never refused", lines)


def _retries(result: Report) -> Section:
    retries = result["retries"]
    if retries is None:
        return Section("retries", "")
    mean = "" if retries["mean_wait"] is None else f", after {span(retries['mean_wait'])} on average"
    lines = [
        (
            f"{number(retries['made'])} retries; {number(retries['admitted'])} requests admitted{mean}; "
            f"{number(retries['gave_up'])} given up"
        )
    ]
    return Section("retries", f"If refused callers retry up to {retries['tries']} times", lines)


def _comparison(report: Report) -> Section:
    changes, result, policy = (report["compare"][name] for name in ("changes", "result", "policy"))
    lines = [
        *rule_lines(policy),
        f"Would have refused {number(result['refused'])} ({percent(result['refused_share'])}).",
        (
            f"{number(changes['newly_refused'])} requests would be newly refused, "
            f"{number(changes['newly_admitted'])} newly admitted; "
            f"{number(changes['both_admit'] + changes['both_refuse'])} unchanged."
        ),
    ]
    return Section("changes", f"Compared with {printable(policy['name'])}", lines)


def _changes(changes: Report) -> Iterator[Section]:
    for name, title in (
        ("newly_refused_callers", "Newly refused callers"),
        ("newly_admitted_callers", "Newly admitted callers"),
    ):
        rows = [[_cut(caller["key"]), number(caller["requests"])] for caller in changes[name]]
        yield Section(name, title, (), ("key", "requests"), rows)
    rows = [
        [
            f"{moment(example['time'])}  {_cut(example['key'])}",
            f"now {example['change']}",
            _cut(example["rule"] or "-"),
        ]
        for example in changes["examples"]
    ]
    yield Section("examples", "First changed requests", (), ("request", "change", "by"), rows)


def _unread(log: Report) -> Section:
    lines = []
    for bad in log["bad_by_reason"]:
        lines.append(f"{number(bad['count'])}  {bad['reason']}")
        lines += (f"    {printable(example)}" for example in bad["examples"])
    return Section("unread", "Skipped lines", lines)
