"""The report of a replay as one JSON document. The text and the page are made from it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate import Rule
from headgate.clock import MICROSECONDS
from headgate.policy import in_words
from headgate_server.replay.requests import LogCounts
from headgate_server.replay.simulation import Replayed
from headgate_server.replay.tally import MOST_KEYS

VERSION = 1

Report = dict[str, Any]
"""The document; docs/how-to/replay.md describes its fields."""


def make_report(replayed: Replayed, counts: LogCounts, policies: Sequence[str], buffer: int) -> Report:
    """Return the report of a replay.

    Args:
        replayed: The finished replay.
        counts: Counts of the lines that were read.
        policies: The name of each policy: the limiter and its file.
        buffer: How many lines were held to be sorted.
    """
    first, *others = replayed.simulations
    compare = None
    if others and replayed.changes is not None:
        compare = {
            "policy": _policy(others[0].limiter.policy.rules, policies[1]),
            "result": others[0].as_json(),
            "changes": replayed.changes.as_json(),
        }
    return {
        "headgate_replay": VERSION,
        "log": log_figures(counts, replayed.first, replayed.last),
        "policy": _policy(first.limiter.policy.rules, policies[0]),
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
        "latest": counts.latest_us / MICROSECONDS,
        "without_zone": counts.without_zone,
        "was_refused": counts.was_refused,
        "problems": counts.problems,
    }


def _notes(replayed: Replayed, counts: LogCounts, buffer: int) -> list[str]:
    """Return what the log cannot tell."""
    notes = list(counts.problems)
    if counts.too_late:
        notes.append(
            f"{counts.too_late:,} lines were left out: they are older than lines before them by more than the "
            f"{buffer:,} lines that are held to be sorted (the oldest by {counts.latest_us / MICROSECONDS:,.0f} s). "
            f"Give logs that follow each other as separate files, or raise --buffer."
        )
    if counts.without_zone:
        notes.append(f"{counts.without_zone:,} times name no time zone and were read as UTC.")
    if replayed.whole_seconds:
        notes.append(
            "All times in the log are whole seconds. Requests of one second are decided in the order of their lines, as if "
            "they came at its begin; a rule with a period of a second or less looks stricter than it is."
        )
    if counts.was_refused:
        notes.append(
            f"{counts.was_refused:,} requests of the log were refused at the time. Their callers may have tried again "
            f"because of it, and these retries are in the log as requests."
        )
    retries = replayed.simulations[0].retries
    if retries is None:
        notes.append(
            "A refusal changes what callers do next: they try again, slow down or give up. The log cannot tell; "
            "--model-retries shows one possibility."
        )
    else:
        notes.append(
            f"Retries are a model: a refused caller comes again as soon as the refusal allows, in whole seconds, at most "
            f"{retries.tries} times. They are counted apart from the log's requests, but take units like these."
        )
    notes.append(
        "What was used before the log begins is not known, so the first period of each rule admits more than it would have. "
        "If the clock of the server was set during the log, times are off by as much."
    )
    for simulation in replayed.simulations:
        if simulation.limiter.left_out:
            notes.append(
                f"Left out: {', '.join(simulation.limiter.left_out)}. Places that are held at once are not replayed: most "
                f"logs do not have the duration of requests."
            )
        if simulation.limiter.overflowed:
            notes.append(
                f"{simulation.limiter.overflowed:,} requests found the memory full and shared one count: the figures "
                f"are too strict."
            )
    if not replayed.simulations[0].tally.follows_all_keys:
        notes.append(
            f"There are too many keys to follow each: figures over keys are those of the first {MOST_KEYS:,} keys. "
            f"Requests, rules and hours are exact."
        )
    return notes


def _policy(rules: Sequence[Rule], name: str) -> Report:
    return {"name": name, "rules": [{"name": rule.name, "words": in_words(rule)} for rule in rules]}
