"""The report as one page: the dashboard's style inside, charts as drawings, no script, and nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from headgate_server.replay.report import Report
from headgate_server.wording import hour, moment, number, percent, span

MOST_BARS = 180
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_WIDTH, _HEIGHT = 1_200, 160


def report_page(report: Report) -> str:
    """Return the report as an HTML document."""
    title = f"Replay: {report['policy']['name']}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>",
            f'<link rel="icon" href="{_icon()}">',
            f"<style>{_file('static', 'style.css')}{_file('replay', 'page.css')}</style>",
            "</head>",
            "<body>",
            _HATCH,
            *_header(report),
            '<main id="main">',
            *_figures(report),
            *_over_time(report),
            '<div class="columns">',
            *_changes(report),
            *_rules(report["result"]),
            *_callers(report["result"]),
            *_waits(report["result"]),
            *_keys(report["result"]),
            *_routes(report["result"]),
            *_retries(report["result"]),
            "</div>",
            *_unread(report["log"]),
            *_notes(report["notes"]),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


_HATCH = """<svg class="definitions" width="0" height="0" aria-hidden="true" focusable="false"><defs>
<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect class="hatch-ground" width="5" height="5"/><rect class="hatch-stripe" width="2.5" height="5"/>
</pattern></defs></svg>"""


def _file(*path: str) -> str:
    """Return a file of the package."""
    return resources.files("headgate_server").joinpath(*path).read_text(encoding="utf-8")


def _icon() -> str:
    icon = _file("static", "favicon.svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(icon.encode()).decode()}"


def _header(report: Report) -> Iterator[str]:
    log = report["log"]
    files, when = escape(", ".join(log["files"])), f"{moment(log['from'])} to {moment(log['to'])} UTC"
    yield '<header class="top"><div class="top-row">'
    yield f'<div class="brand"><img src="{_icon()}" alt="" width="28" height="28"><h1>Headgate replay</h1></div>'
    yield f'<p class="sub">{number(log["lines"])} lines of {files}, {when}</p>'
    yield "</div></header>"


def _figures(report: Report) -> Iterator[str]:
    result, keys = report["result"], report["result"]["keys"]
    about = "" if keys["exact"] else "about "
    tiles = (
        ("Requests", "requests", number(result["requests"]), ""),
        ("Would be refused", "refused", number(result["refused"]), ""),
        ("Share refused", "share", percent(result["refused_share"]), ""),
        ("Keys refused", "keys", f"{about}{number(keys['refused'])}", f"of {about}{number(keys['all'])}"),
    )
    yield '<section aria-labelledby="summary"><h2 id="summary" class="visually-hidden">Summary</h2>'
    yield '<div class="figures">'
    for title, name, value, unit in tiles:
        yield (
            f'<div class="figure"><h3>{title}</h3><p class="figure-line"><span class="figure-value" data-figure="{name}">'
            f'{value}</span> <span class="figure-unit">{unit}</span></p></div>'
        )
    yield "</div></section>"


def _over_time(report: Report) -> Iterator[str]:
    compare = report["compare"]
    policies = [(report["policy"], report["result"])]
    if compare is not None:
        policies.append((compare["policy"], compare["result"]))
    bars = [_bars(result) for _, result in policies]
    highest = max(admitted + refused for own in bars for _, admitted, refused in own[1])
    for (policy, result), own in zip(policies, bars, strict=True):
        yield '<section class="panel">'
        yield f"<h2>{escape(policy['name'])}: refusals over time</h2>"
        yield '<ul class="rules policy">'
        yield from (
            f"<li>{escape(rule['words'])} <code>{escape(rule['name'])}</code></li>"
            for rule in policy["rules"]
        )
        yield "</ul>"
        yield from _chart(policy["name"], result, *own, highest)
        yield "</section>"


def _bars(result: Report) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the width of the bars in seconds, and start, admitted and refused of each: no more than fit."""
    timeline = result["timeline"]
    width, bins = timeline["seconds"], timeline["bins"]
    first, last = bins[0][0], bins[-1][0]
    wider = -(-((last - first) // width + 1) // MOST_BARS) * width
    merged: dict[int, list[int]] = {}
    for start, admitted, refused in bins:
        counts = merged.setdefault((start - first) // wider, [0, 0])
        counts[0] += admitted
        counts[1] += refused
    return wider, [
        (first + index * wider, admitted, refused) for index, (admitted, refused) in sorted(merged.items())
    ]


def _chart(
    name: str, result: Report, width: int, bars: list[tuple[int, int, int]], highest: int
) -> Iterator[str]:
    first, last = bars[0][0], bars[-1][0] + width
    step = _WIDTH * width / (last - first)
    counts = f"{number(result['admitted'])} admitted, {number(result['refused'])} refused"
    label = f"{name}: {counts}, in bars of {span(width)}"
    yield '<p class="legend"><span class="is-admitted">admitted</span><span class="is-refused">refused</span>'
    yield f"highest bar {number(highest)} in {span(width)}</p>"
    yield (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">'
    )
    for start, admitted, refused in bars:
        x = (start - first) // width * step
        yield f"<g><title>{hour(start)}: {number(admitted)} admitted, {number(refused)} refused</title>"
        tall, low = _height(admitted + refused, highest), _height(admitted, highest)
        if refused:
            tall = max(tall, low + 1)  # one refusal among thousands is what people look for
            yield _bar("bar-refused", x, step, _HEIGHT - tall, tall - low)
        if admitted:
            yield _bar("bar-admitted", x, step, _HEIGHT - low, low)
        yield "</g>"
    yield "</svg>"
    yield f'<p class="axis"><span>{hour(first)}</span><span>{hour(last)} UTC</span></p>'
    rows = [(hour(start), number(admitted), number(refused)) for start, admitted, refused in bars]
    yield '<details class="figures-table"><summary>Figures as a table</summary>'
    yield from _table(("From (UTC)", "Admitted", "Refused"), rows)
    yield "</details>"


def _height(count: int, highest: int) -> float:
    return max(1.0, count * (_HEIGHT - 4) / highest) if count else 0.0


def _bar(kind: str, x: float, step: float, y: float, height: float) -> str:
    gap = min(1.5, step * 0.1)
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{step - gap:.2f}" height="{height:.1f}"/>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table: the first column is text that others may have chosen, the rest are numbers."""
    head = "".join(f'<th scope="col" class="number">{heading}</th>' for heading in headings[1:])
    yield f'<table><thead><tr><th scope="col">{headings[0]}</th>{head}</tr></thead><tbody>'
    for first, *others in rows:
        cells = "".join(f'<td class="number">{escape(cell)}</td>' for cell in others)
        yield f"<tr><td>{escape(first)}</td>{cells}</tr>"
    yield "</tbody></table>"


def _panel(name: str, title: str, lines: Iterable[str]) -> Iterator[str]:
    inside = list(lines)
    if inside:
        yield f'<section class="panel" id="{name}" tabindex="0" aria-label="{escape(title)}"><h2>{escape(title)}</h2>'
        yield from inside
        yield "</section>"


def _steps(rows: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    """Yield bars beside each other's words: what, how many, and the kind of bar."""
    highest = max(count for _, count, _ in rows) or 1
    yield '<div class="steps">'
    for words, count, kind in rows:
        yield (
            f'<span>{escape(words)}</span><div class="use-bar {kind}" style="--share: {count / highest:.4f}"></div>'
            f'<span class="number">{number(count)}</span>'
        )
    yield "</div>"


def _rules(result: Report) -> Iterator[str]:
    rows = [
        (rule["name"], number(rule["refused"]), number(rule["refused_alone"])) for rule in result["rules"]
    ]
    if result["too_costly"]:
        costly = number(result["too_costly"])
        rows.append(("(cost above every capacity)", costly, costly))
    yield from _panel("rules", "Refused by rule", _table(("Rule", "Refused", "No other rule did"), rows))
    if result["shadow"]:
        shadow = [(rule["name"], number(rule["refused"]), number(rule["asked"])) for rule in result["shadow"]]
        yield from _panel("shadow", "Shadow rules", _table(("Rule", "Would refuse", "Of admitted"), shadow))


def _callers(result: Report) -> Iterator[str]:
    rows = [
        (caller["key"], number(caller["refused"]), number(caller["requests"]))
        for caller in result["worst_callers"]
    ]
    if rows:
        yield from _panel("callers", "Most refused callers", _table(("Key", "Refused", "Of"), rows))


def _waits(result: Report) -> Iterator[str]:
    waits = result["waits"]
    rows = [(step["words"], step["refused"], "is-refused") for step in waits["steps"] if step["refused"]]
    if waits["never"]:
        rows.append(("for ever", waits["never"], "is-refused"))
    if rows:
        yield from _panel("waits", "How long they would have had to wait", _steps(rows))


def _keys(result: Report) -> Iterator[str]:
    room = result["headroom"]
    rows = [
        (f"used up to {step['to']:.0%} of the limit", step["keys"], "")
        for step in room["steps"]
        if step["keys"]
    ]
    rows.append(("were refused", result["keys"]["refused"], "is-refused"))
    yield from _panel("keys", "How close to the limit keys came", _steps(rows))


def _routes(result: Report) -> Iterator[str]:
    rows = [
        (route["route"], number(route["refused"]), number(route["refused"] + route["admitted"]))
        for route in result["routes"]
    ]
    if rows:
        yield from _panel("routes", "By route", _table(("Route", "Refused", "Of"), rows))


def _retries(result: Report) -> Iterator[str]:
    retries = result["retries"]
    if retries is not None:
        rows = (
            ("More requests", number(retries["made"])),
            ("Get through", number(retries["admitted"])),
            (
                "How long they wait on average",
                "-" if retries["mean_wait"] is None else span(retries["mean_wait"]),
            ),
            ("Give up", number(retries["gave_up"])),
        )
        title = f"If the refused try again, up to {retries['tries']} times"
        yield from _panel("retries", title, _table(("What", "How many"), rows))


def _changes(report: Report) -> Iterator[str]:
    compare = report["compare"]
    if compare is None:
        return
    changes = compare["changes"]
    rows = [
        ("Admitted by both", changes["both_admit"], ""),
        ("Refused by both", changes["both_refuse"], "is-refused"),
        ("Refused only by the second", changes["newly_refused"], "is-refused"),
        ("Admitted only by the second", changes["newly_admitted"], ""),
    ]
    yield from _panel("changes", f"What {compare['policy']['name']} changes", _steps(rows))
    for name, title in (
        ("newly_refused_callers", "Newly refused callers"),
        ("newly_admitted_callers", "Newly admitted callers"),
    ):
        callers = [(caller["key"], number(caller["requests"])) for caller in changes[name]]
        if callers:
            yield from _panel(name, title, _table(("Key", "Requests"), callers))


def _unread(log: Report) -> Iterator[str]:
    reasons = [(bad["reason"], bad) for bad in log["bad_by_reason"]]
    if log["without_key"]["count"]:
        reasons.append(("no key: the line does not say for whom to count", log["without_key"]))
    lines = []
    for reason, bad in reasons:
        lines.append(f"<p>{number(bad['count'])} {escape(reason)}</p>")
        lines.append(f'<pre class="examples">{escape(chr(10).join(bad["examples"]))}</pre>')
    yield from _panel("unread", "Lines that were not replayed", lines)


def _notes(notes: Sequence[str]) -> Iterator[str]:
    items = [f"<li>{escape(note)}</li>" for note in notes]
    yield from _panel("notes", "What the log cannot tell", ['<ul class="notes">', *items, "</ul>"])
