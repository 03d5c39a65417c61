"""The report as one HTML page with the style of the dashboard and SVG charts, without scripts and external files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

from headgate_server.formatting import hour, moment, number, percent, span
from headgate_server.replay.report import Report, Section, keys_text, sections

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
            *(line for section in sections(report) if section.name != "hours" for line in _panel(section)),
            "</div>",
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
    result = report["result"]
    refused_keys, all_keys = keys_text(result)
    tiles = (
        ("Requests", "requests", number(result["requests"]), ""),
        ("Would be refused", "refused", number(result["refused"]), ""),
        ("Share refused", "share", percent(result["refused_share"]), ""),
        ("Keys refused", "keys", refused_keys, f"of {all_keys}"),
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
    bins = [each for _, result in policies for each in result["timeline"]["bins"]]
    highest = max(admitted + refused for _, admitted, refused in bins)
    for policy, result in policies:
        yield '<section class="panel">'
        yield f"<h2>{escape(policy['name'])}: refusals over time</h2>"
        yield '<ul class="rules policy">'
        yield from (
            f"<li>{escape(rule['words'])} <code>{escape(rule['name'])}</code></li>"
            for rule in policy["rules"]
        )
        yield "</ul>"
        yield from _chart(policy["name"], result, highest)
        yield "</section>"


def _chart(name: str, result: Report, highest: int) -> Iterator[str]:
    width, bars = result["timeline"]["seconds"], result["timeline"]["bins"]
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
            tall = max(tall, low + 1)  # a single refusal among thousands must be visible
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
    """Yield a table with text in the first column and numbers in the others."""
    head = "".join(f'<th scope="col" class="number">{heading}</th>' for heading in headings[1:])
    yield f'<table><thead><tr><th scope="col">{headings[0]}</th>{head}</tr></thead><tbody>'
    for first, *others in rows:
        cells = "".join(f'<td class="number">{escape(cell)}</td>' for cell in others)
        yield f"<tr><td>{escape(first)}</td>{cells}</tr>"
    yield "</tbody></table>"


def _panel(section: Section) -> Iterator[str]:
    title = escape(section.title)
    yield f'<section class="panel" id="{section.name}" tabindex="0" aria-label="{title}"><h2>{title}</h2>'
    if section.rows:
        yield from _table([heading.capitalize() for heading in section.headings], section.rows)
    else:
        yield f'<p class="lines">{escape(chr(10).join(section.lines))}</p>'
    yield "</section>"
