"""The dashboard in a real browser, on a real server: `tools/test_browser.sh`.

The name does not begin with test_, so that `make test` needs no browser. Tests do not sleep: Playwright's `expect`
retries until the page shows the expected content.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PageErrors
from tests.browser.serving import Server, token_table

Serving = Callable[..., Server]
Look = Callable[..., Page]

POLICY = """
[server]
top_keys = 5

[limiters.login]
rules = ["5/day", "50/week"]

[limiters.api]
rules = [
  { quota = "100/day", scope = "user", name = "daily", tiers = { pro = "1000/day" } },
  { quota = "100000/day", scope = "*", name = "all" },
  { quota = "2/day", scope = "user", name = "candidate", shadow = true },
]
"""
HOSTILE = "<img src=x onerror=alert(1)>'\"&"


def card(page: Page, limiter: str) -> Locator:
    return page.locator("#cards article", has=page.get_by_role("heading", name=limiter, exact=True))


def figure(page: Page, limiter: str, name: str) -> Locator:
    return card(page, limiter).locator(f"[data-figure={name}]")


def inspect(page: Page, key: str) -> None:
    page.locator("#inspect").get_by_label("Key").fill(key)
    page.get_by_role("button", name="Inspect", exact=True).click()


def usage(page: Page, limiter: str, rule: str) -> Locator:
    """Return the element of a rule in the inspector."""
    shown = page.locator("#inspect article", has=page.get_by_role("heading", name=limiter, exact=True))
    return shown.get_by_role("listitem").filter(has_text=rule)


def submit(page: Page, operation: str, *, limiter: str = "login", cost: int = 1) -> Locator:
    """Submit the form, and return the element of the answer."""
    form = page.locator("#try-form")
    form.get_by_label("Limiter").select_option(limiter)
    form.get_by_label("Cost").fill(str(cost))
    form.get_by_role("radio", name=operation).check()
    form.get_by_role("button", name="Ask").click()
    return page.locator("#try-answer")


# --- Figures ---------------------------------------------------------------------------------------------------------


def test_figures_match_the_api(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    server.hit("login", "alice", 7)
    server.hit("api", {"user": "bob"}, 3)
    page = look(server)

    expect(figure(page, "login", "total-admitted")).to_have_text("5")
    expect(figure(page, "login", "total-refused")).to_have_text("2")
    expect(figure(page, "login", "total-share")).to_have_text("28.6%")
    expect(figure(page, "api", "total-admitted")).to_have_text("3")
    expect(page.locator("#total-decisions")).to_have_text(re.compile(r"^10 since \d\d:\d\d:\d\d$"))
    expect(page.locator("#total-admitted")).to_have_text(re.compile(r"^8 since \d\d:\d\d:\d\d$"))
    expect(page.locator("#total-refused")).to_have_text(re.compile(r"^2 since \d\d:\d\d:\d\d$"))
    expect(page.locator("#total-share")).to_have_text(re.compile(r"^20% since \d\d:\d\d:\d\d$"))
    assert server.tick()["totals"] == {
        "login": {"admitted": 5, "refused": 2, "degraded": 0, "degraded_refused": 0},
        "api": {"admitted": 3, "refused": 0, "degraded": 0, "degraded_refused": 0},
    }


def test_figures_outside_the_viewport_are_correct(serving: Serving, look: Look) -> None:
    names = [f"limiter{number}" for number in range(8)]
    server = serving("".join(f'[limiters.{name}]\nrules = ["1/day"]\n' for name in names))
    for name in names:
        server.hit(name, "alice", 3)
    page = look(server, viewport=PHONE)
    for name in names:
        expect(figure(page, name, "total-admitted")).to_have_text("1")
        expect(figure(page, name, "total-refused")).to_have_text("2")
        expect(card(page, name).get_by_role("slider")).to_have_attribute(
            "aria-valuetext", re.compile("admitted")
        )
    assert page.evaluate("scrollY") == 0
    hidden_chart = card(page, names[-1]).locator(".bar-refused")
    assert hidden_chart.get_attribute("d") is None
    hidden_chart.scroll_into_view_if_needed()
    expect(hidden_chart).to_have_attribute("d", re.compile("^M"))


def many_limiters(store: str = "memory://") -> str:
    return "".join(
        f'[limiters.limiter{number:03}]\nrules = ["1/day", "9/week"]\nstore = "{store}"\n'
        for number in range(200)
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_many_limiters_make_a_short_page_with_problems_first(
    serving: Serving, look: Look, width: int
) -> None:
    server = serving(many_limiters())
    server.hit("limiter150", "alice", 5)
    server.hit("limiter151", "alice", 9)
    server.hit("limiter003", "alice", 1)
    page = look(server, viewport={"width": width, "height": 900})
    headings = page.locator("#cards article h3")
    expect(headings).to_have_text(["limiter151", "limiter150", "limiter003"])
    expect(page.locator("#lines li")).to_have_count(197)
    expect(page.locator("#more-title")).to_have_text(
        "197 limiters without a decision in the last five minutes"
    )
    expect(page.locator("#lines li").first).to_have_text("limiter0001/day, 9/week")
    heights = page.locator("#lines li").evaluate_all("nodes => nodes.map(node => node.clientHeight)")
    assert max(heights) < 40  # one line each
    assert page.evaluate("document.documentElement.scrollHeight") < 12_000
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(page) == []

    server.hit("limiter099", "alice", 20)  # becomes the first card
    expect(headings).to_have_text(["limiter099", "limiter151", "limiter150", "limiter003"])
    page.get_by_role("button", name="Show limiter042").press("Enter")
    expect(headings.last).to_have_text("limiter042")
    expect(card(page, "limiter042")).to_be_focused()
    expect(page.locator("#lines li")).to_have_count(195)
    page.get_by_placeholder("Filter by name").fill("limiter19")
    expect(headings).to_have_count(0)
    expect(page.locator("#lines li")).to_have_count(10)


def test_a_busy_server_has_few_cards(serving: Serving, look: Look) -> None:
    server = serving(many_limiters())
    for number in range(200):
        server.hit(f"limiter{number:03}", "alice", 1 + number % 20)
    page = look(server)
    expect(page.locator("#cards article")).to_have_count(12)
    expect(page.locator("#cards article h3").first).to_have_text("limiter019")
    expect(page.locator("#more-title")).to_have_text("188 more limiters")


def test_a_store_shared_by_many_limiters_is_one_row(serving: Serving, look: Look) -> None:
    server = serving(many_limiters("redis://127.0.0.1:1/0"))
    page = look(server, live=False)
    row = page.locator("#stores tbody").get_by_role("row")
    expect(row).to_have_count(1)
    expect(row.get_by_role("cell").nth(2)).to_have_text("Down")
    row.get_by_text("200 limiters").click()
    expect(row).to_contain_text("limiter000, limiter001, ")
    expect(page.get_by_role("alert")).to_contain_text("200 limiters: everything is admitted")
    expect(page.locator("#lines .badge:visible")).to_have_count(200)


def test_a_dark_page_is_printed_with_dark_text(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY), color_scheme="light")
    ink = page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate("getComputedStyle(document.body).color") != ink
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == ink


def test_limiters_describe_their_rules_in_words(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    described = httpx.get(f"{server.url}/v1/limiters").json()["limiters"]
    assert [limiter["name"] for limiter in described] == ["login", "api"]
    for limiter in described:
        for rule in limiter["rules"]:
            expect(card(page, limiter["name"]).locator(".rules")).to_contain_text(rule["words"])
    expect(card(page, "api").locator(".rules")).to_contain_text("pro 1000/day")


def test_the_page_updates_automatically(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    expect(figure(page, "login", "total-admitted")).to_have_text("0")
    expect(page.locator("#refused-body")).to_have_text("No one has been refused.")
    server.hit("login", "alice", 6)
    expect(figure(page, "login", "total-admitted")).to_have_text("5")
    expect(figure(page, "login", "total-refused")).to_have_text("1")
    expect(page.locator("#refused-body li")).to_have_text("alicerefused by login1")
    server.hit("login", "alice", 1)
    expect(page.locator("#refused-body li")).to_have_text("alicerefused by login2")


def test_figures_continue_after_a_server_restart(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving(POLICY)
    page = look(server)
    server.hit("login", "alice", 4)
    expect(figure(page, "login", "total-admitted")).to_have_text("4")

    page_errors.allow("Failed to load resource: net::ERR_|status of 503")
    server.stop()
    expect(page.locator("#connection")).to_have_text(re.compile(r"^No data since \d\d:\d\d:\d\d$"))
    expect(page).to_have_title(re.compile(r"^No data since .* Headgate$"))
    expect(page.locator("#figure-decisions")).to_have_text("\N{EN DASH}")
    expect(card(page, "login").locator(".card-now")).to_have_text("\N{EN DASH}/s")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).opacity") == "0.5"
    expect(figure(page, "login", "total-admitted")).to_have_text("4")

    server.start()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page).to_have_title("Headgate")
    server.hit("login", "bob", 3)
    expect(figure(page, "login", "total-admitted")).to_have_text("3")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).opacity") == "1"


def test_a_server_that_hangs_is_not_shown_as_live(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    server.signal(signal.SIGSTOP)
    try:
        expect(page.locator("#connection")).to_have_text(re.compile("^No data since "))
        expect(page).to_have_title(re.compile("^No data since "))
    finally:
        server.signal(signal.SIGCONT)
    expect(page.locator("#connection")).to_have_text("Live")


def test_all_rates_use_the_same_window(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    server.hit("login", "alice", 9)
    expect(figure(page, "login", "total-admitted")).to_have_text("5")
    shown = page.evaluate("""() => {
        const number = (selector) => parseFloat(document.querySelector(selector).textContent);
        const own = '[data-limiter=login] ';
        return ['#figure-decisions', own + '.card-now'].map(number).concat(
            [['#figure-admitted', '#figure-refused'], [own + '.legend-admitted b', own + '.legend-refused b']]
            .map(([one, other]) => number(one) + number(other)));
    }""")
    assert shown == pytest.approx([shown[0]] * 4, abs=0.11)
    expect(card(page, "login").locator(".readout-time")).to_have_text("Last 10 s")


def test_missed_ticks_do_not_cause_a_peak(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY))
    shown = page.evaluate("""async () => {
        const { History } = await import('/static/history.js');
        const history = new History();
        const figures = (admitted) => ({ login: { admitted, refused: 0, degraded: 0, degraded_refused: 0 } });
        history.add({ time: 100, limiters: figures(10), totals: figures(10) });
        history.add({ time: 104, limiters: figures(10), totals: figures(50) });
        return { ...history.sum(10, 'login'), bar: history.bins('login').at(-1).admitted };
    }""")
    assert (shown["admitted"], shown["seconds"], shown["bar"]) == (50, 5, 10)


def test_the_chart_describes_decisions_for_screen_readers(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    server.hit("login", "alice", 5)
    expect(figure(page, "login", "total-admitted")).to_have_text("5")
    chart = card(page, "login").get_by_role("slider")
    expect(chart).to_have_accessible_name("login: decisions per second in the last five minutes")
    chart.focus()
    chart.press("Home")
    expect(chart).to_have_attribute("aria-valuenow", "0")
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"\d\d:\d\d:\d\d to .*: no figures"))
    chart.press("End")
    expect(chart).to_have_attribute("aria-valuenow", "59")
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"[\d.]+ admitted, 0 refused per second"))
    card(page, "login").get_by_text("Figures as a table").click()
    rows = card(page, "login").get_by_role("row")
    expect(rows.first).to_have_text("FromAdmitted per secondRefused per secondWithout the store")
    expect(rows.nth(1)).to_have_text(re.compile(r"\d\d:\d\d:\d\d[\d.]+00"))


def test_charts_show_an_hour_or_a_day_across_a_restart(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving('[server]\nhistory = "history"\n' + POLICY.replace("[server]", ""))
    page = look(server)
    server.hit("login", "alice", 7)
    expect(figure(page, "login", "total-refused")).to_have_text("2")
    page_errors.allow("Failed to load resource: net::ERR_|status of 503")
    server.stop()
    server.start()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(figure(page, "login", "total-refused")).to_have_text("0")
    chart = card(page, "login").get_by_role("slider")
    card(page, "login").get_by_text("Figures as a table").click()
    for name, words, newest in (("1 h", "the last hour", "59"), ("1 d", "the last day", "95")):
        page.get_by_role("radio", name=name).check()
        expect(chart).to_have_accessible_name(f"login: decisions per second in {words}")
        expect(chart).to_have_attribute("aria-valuemax", newest)
        expect(card(page, "login").locator(".bar-refused")).to_have_attribute("d", re.compile("^M"))
        expect(card(page, "login").get_by_role("row").nth(1)).to_have_text(
            re.compile(r"\d\d:\d\d:\d\d(?!00)[\d.]+0$")
        )
    page.get_by_role("radio", name="5 min").check()
    expect(chart).to_have_attribute("aria-valuemax", "59")


def test_shadow_rules_show_would_be_refusals(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    server.hit("api", {"user": "bob"}, 8)
    row = page.locator("#shadow tbody").get_by_role("row")
    expect(row.get_by_role("cell")).to_have_text(
        [
            "api",
            "candidateat most 2 in any day for each user",
            "8",
            "6 75%",
            "\N{EN DASH}",
            "\N{EN DASH}",
            "\N{EN DASH}",
            "",
        ]
    )


def test_a_rule_shows_its_line_in_the_policy_file(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    rule = card(page, "login").get_by_role("listitem").filter(has_text="per-day")
    place = rule.locator("summary")
    expect(place).to_have_text("headgate.toml:6")
    place.click()
    expect(rule.get_by_text(f"{server.policy_file}:6")).to_be_visible()
    expect(rule.get_by_role("group", name="per-day for the policy file")).to_have_text(
        '{ quota = "5/day", name = "per-day" }'
    )
    rule.get_by_role("button", name="Copy per-day").click()
    expect(rule.get_by_role("status")).to_have_text(re.compile("Copied|Selected"))
    assert violations(page) == []


def test_a_candidate_is_shown_beside_its_live_rule(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving(POLICY)
    page = look(server)
    form = page.locator("#candidate-form")
    form.get_by_label("What if").select_option(label="login: per-day (5/day)")
    expect(form.get_by_label("were")).to_have_value("5/day")
    form.get_by_label("were").fill("3/day")
    form.get_by_role("button", name="Watch").click()
    expect(form.get_by_role("status")).to_contain_text("nothing is refused because of it")
    row = page.locator("#shadow tbody").get_by_role("row").filter(has_text="candidate of")
    expect(row).to_have_count(1)
    server.hit("login", "alice", 7)
    expect(row.get_by_role("cell").nth(2)).to_have_text("7")
    expect(row.get_by_role("cell").nth(3)).to_have_text("4 57.1%")
    expect(row.get_by_role("cell").nth(5)).to_have_text("2")
    expect(row.get_by_role("cell").nth(6)).to_have_text("0")
    expect(row.get_by_role("cell").nth(7)).to_contain_text("Warming up until")
    expect(figure(page, "login", "total-admitted")).to_have_text("5")
    row.get_by_text("For the file").click()
    expect(row.get_by_role("group", name="For the policy file")).to_contain_text(
        '{ quota = "3/day", name = "per-day" }'
    )
    assert violations(page) == []
    row.get_by_role("button", name="Stop watching").click()
    expect(row).to_have_count(0)
    page_errors.expect("status of 422")
    form.get_by_label("were").fill("3/fortnight")
    form.get_by_role("button", name="Watch").click()
    expect(form.get_by_role("status")).to_contain_text("fortnight")


def test_an_outage_shows_store_time_error_and_policy(serving: Serving, look: Look) -> None:
    server = serving("""
[limiters.login]
rules = ["5/day"]
store = "redis://127.0.0.1:1/0"
on_store_error = "closed"
[limiters.api]
rules = ["5/day"]
store = "redis://127.0.0.1:1/0"
[limiters.share]
rules = ["5/day"]
store = "redis://user:secret@127.0.0.1:2/0"
on_store_error = { local = 0.25 }
[limiters.near]
rules = ["5/day"]
""")
    page = look(server, live=False)
    row = page.locator("#stores tbody").get_by_role("row").first
    server.hit("login", "alice", 3)
    expect(row.get_by_role("cell").nth(2)).to_have_text("Down")
    expect(row.get_by_role("cell").nth(3)).to_have_text("Open")
    expect(card(page, "login").locator(".badge")).to_have_text("Store down")
    banner = page.get_by_role("alert")
    expect(banner).to_contain_text("2 stores down")
    expect(banner).to_contain_text(
        re.compile(r"redis://127\.0\.0\.1:1/0 has not counted since \d\d:\d\d:\d\d: Error .+")
    )
    expect(banner).to_contain_text(
        re.compile(r"redis://\*\*\*@127\.0\.0\.1:2/0 has not counted since \d\d:\d\d:\d\d: Error .+")
    )
    expect(banner).to_contain_text("share: each worker admits 25% of every limit by itself")
    expect(banner.get_by_role("listitem").filter(has_text="everything is")).to_contain_text(
        ["login", "login", "api"]
    )
    expect(banner).to_contain_text("login: everything is refused")
    expect(banner).to_contain_text("api: everything is admitted")
    expect(page.locator("#connection")).to_have_text("2 stores down")
    expect(page).to_have_title(re.compile("^2 stores down"))
    expect(figure(page, "login", "total-refused")).to_have_text("3")
    expect(figure(page, "login", "total-degraded")).to_have_text("3")
    expect(figure(page, "near", "total-degraded")).to_be_hidden()
    expect(page.locator("#total-degraded")).to_contain_text("3 since")
    expect(card(page, "login").locator(".rule-refused")).to_have_text("")  # not refused by a rule
    axis = card(page, "login").locator(".grid text").all_text_contents()
    assert axis[3:] == ["\u22125 min", "\u22124 min", "\u22123 min", "\u22122 min", "\u22121 min", "now"]
    expect(card(page, "login").locator(".bar-degraded")).to_have_attribute("d", re.compile("^M"))
    expect(card(page, "login").locator(".bar-refused")).to_have_attribute("d", "")
    assert violations(page) == []


def test_a_store_shows_its_latency_and_last_contact(serving: Serving, look: Look, tmp_path: Path) -> None:
    server = serving(f'[limiters.login]\nrules = ["5/day"]\nstore = "sqlite:///{tmp_path}/limits.db"\n')
    page = look(server)
    server.hit("login", "alice")
    cells = page.locator("#stores tbody").get_by_role("row").get_by_role("cell")
    expect(cells.nth(5)).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(cells.nth(6)).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(cells.nth(7)).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))


@pytest.mark.parametrize("width", [360, 768, 900, 1440])
def test_the_table_of_stores_fits_and_is_readable(serving: Serving, look: Look, width: int) -> None:
    server = serving("""
[limiters.login]
rules = ["5/day"]
store = "redis://127.0.0.1:1/0"
[limiters.exports]
rules = ["5/day"]
store = "sqlite:///near.db"
""")
    server.hit("login", "alice")
    server.hit("exports", "alice")
    page = look(server, live=False, viewport={"width": width, "height": 900})
    cells = page.locator("#stores tbody").get_by_role("row").nth(1).get_by_role("cell")
    expect(cells.nth(7)).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    assert page.locator("#stores").evaluate("node => node.scrollWidth - node.clientWidth") == 0
    names = page.locator("#stores .name")
    assert names.evaluate_all("nodes => nodes.map(node => node.getClientRects().length)") == [1, 1, 1, 1]


def test_refusals_are_shown_by_rule_and_tier(serving: Serving, look: Look) -> None:
    server = serving("""
[limiters.api]
rules = [
  { quota = "1/day", name = "daily", tiers = { pro = "2/day" } },
  { quota = "9/week", name = "weekly" },
]
""")
    page = look(server)
    calls = [
        {"limiter": "api", "operation": "hit", "key": key, "tier": tier}
        for key, tier in [("a", "pro")] * 4 + [("b", None)] * 2
    ]
    server.post("/v1/batch", {"calls": calls})
    refused = card(page, "api").locator(".rule-refused")
    expect(refused).to_have_text(["refused 3 (pro 2, no tier 1)", ""])


def test_open_holds_are_shown(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    hold = server.post("/v1/limiters/login/hold", {"key": "alice", "cost": 3})["hold"]
    expect(figure(page, "login", "held")).to_have_text("3")
    server.post(f"/v1/holds/{hold}/release", {})
    expect(figure(page, "login", "held")).to_be_hidden()


def test_places_tokens_and_calendars_have_correct_labels(serving: Serving, look: Look) -> None:
    server = serving(
        """
        [limiters.model]
        rules = [
          { quota = "1000/minute", name = "tokens", unit = "tokens" },
          { kind = "concurrent", quota = 3, lease = "1h", name = "in flight" },
          { kind = "calendar", quota = "10/year", timezone = "Europe/Berlin", name = "year" },
        ]
        """
    )
    page = look(server)
    for _ in range(2):
        server.post("/v1/limiters/model/hold", {"key": "alice", "cost": {"tokens": 400}})
    expect(figure(page, "model", "held")).to_have_text("800 tokens, 2 requests")
    expect(card(page, "model").locator(".rule-held")).to_have_text(["", "up to 2 places held now", ""])
    inspect(page, "alice")
    expect(usage(page, "model", "tokens")).to_contain_text("800 of 1,000 tokens used")
    places = usage(page, "model", "in flight")
    expect(places).to_contain_text("2 of 3 places held")
    expect(places).to_contain_text(re.compile("all free in .* at most"))
    expect(usage(page, "model", "year")).to_contain_text(
        re.compile(r"empty at 1 Jan \d{4}, 00:00 \(Europe/Berlin\)")
    )


@pytest.mark.parametrize("width", [360, 390, 1440])
def test_the_navigation_fits_on_one_line(serving: Serving, look: Look, width: int) -> None:
    page = look(serving(POLICY, demo=True), viewport={"width": width, "height": 900})
    expect(page.get_by_role("switch")).to_be_visible()
    boxes = [link.bounding_box() for link in page.get_by_role("navigation").get_by_role("link").all()]
    shown = [box for box in boxes if box]
    assert len(shown) == 6
    assert {box["y"] for box in shown} == {shown[0]["y"]}
    assert {box["height"] for box in shown} == {shown[0]["height"]}
    assert min(box["x"] for box in shown) >= 0
    assert max(box["x"] + box["width"] for box in shown) <= width
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_refused_keys_are_shown_only_if_enabled(serving: Serving, look: Look) -> None:
    server = serving('[limiters.login]\nrules = ["0/day"]\n')
    server.hit("login", "mallory")
    page = look(server)
    expect(figure(page, "login", "total-refused")).to_have_text("1")
    expect(page.locator("#refused-body")).to_contain_text("Write top_keys = 10 under [server]")
    expect(page.locator("body")).not_to_contain_text("mallory")


def test_a_bad_policy_file_is_shown_until_it_is_fixed(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    expect(page.get_by_role("alert")).to_be_hidden()
    server.policy_file.write_text('[limiters.login]\nrules = ["5/fortnight"]\n', encoding="utf-8")
    expect(page.get_by_role("alert")).to_contain_text("5/fortnight")
    expect(card(page, "login")).to_contain_text("5 in any day")
    mended = 'allow_removal = true\n[limiters.login]\nrules = ["6/day"]\n'
    server.policy_file.write_text(mended, encoding="utf-8")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(card(page, "login")).to_contain_text("6 in any day")
    expect(card(page, "api")).to_have_count(0)


def test_the_demo_can_be_switched_off(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY, demo=True))
    link = page.get_by_role("link", name="mail")
    expect(link).to_have_attribute("href", "http://127.0.0.1:8001")
    expect(page.locator("#services li")).to_contain_text("120 sent, 7 refused")
    switch = page.get_by_role("switch", name="Demo traffic")
    expect(switch).to_be_checked()
    switch.click()
    expect(switch).not_to_be_checked()
    other = look_again(page)
    expect(other.get_by_role("switch", name="Demo traffic")).not_to_be_checked()


def look_again(page: Page) -> Page:
    """Reload the page."""
    page.reload()
    expect(page.locator("#connection")).to_have_text("Live")
    return page


# --- Inspector -------------------------------------------------------------------------------------------------------


def test_the_inspector_shows_every_rule_and_updates(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    server.hit("login", "alice", 3)
    page = look(server)
    inspect(page, "alice")
    daily = usage(page, "login", "per-day")
    expect(daily).to_contain_text("3 of 5 used")
    expect(daily).to_contain_text("2 left")
    expect(daily.get_by_role("meter")).to_have_attribute("aria-valuetext", "3 of 5")
    expect(usage(page, "login", "per-week")).to_contain_text("3 of 50 used")
    expect(page.locator("#inspect summary")).to_have_text("1 limiter with nothing counted")
    server.hit("login", "alice", 2)
    expect(daily).to_contain_text("5 of 5 used")
    expect(daily).to_contain_text(re.compile(r"Full, frees in (1 d|2[34] h).*, at "))


def test_a_reset_is_confirmed_and_then_done(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    server.hit("login", "alice", 5)
    server.hit("api", {"user": "alice"}, 4)
    page = look(server)
    inspect(page, "alice")
    expect(usage(page, "login", "per-day")).to_contain_text("5 of 5 used")

    page.get_by_role("button", name="Reset in login").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("login forgets everything that it has counted for alice")
    dialog.get_by_role("button", name="Cancel").click()
    assert server.post("/v1/limiters/login/check", {"key": "alice"})["allowed"] is False

    page.get_by_role("button", name="Reset in login").click()
    dialog.get_by_role("button", name="Reset").click()
    expect(usage(page, "login", "per-day")).to_contain_text("0 of 5 used")
    assert server.post("/v1/limiters/login/check", {"key": "alice"})["remaining"] == 4

    page.get_by_role("button", name="Reset in api").click()
    expect(dialog).to_contain_text("That includes what it counts for everybody together.")
    dialog.get_by_role("button", name="Reset").click()
    expect(usage(page, "api", "daily")).to_contain_text("0 of 100 used")


def test_a_reset_works_after_a_cancelled_one(serving: Serving, look: Look) -> None:
    """The browser reports the end of the first dialog only when the second dialog is open."""
    server = serving(POLICY)
    server.hit("login", "alice", 5)
    page = look(server)
    inspect(page, "alice")
    reset = page.get_by_role("button", name="Reset in login")
    reset.evaluate(
        "button => { button.click(); document.getElementById('confirm-dialog').close(); button.click(); }"
    )
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(usage(page, "login", "per-day")).to_contain_text("0 of 5 used")


def test_scoped_and_long_refused_keys_can_be_selected(serving: Serving, look: Look) -> None:
    policy = '[server]\ntop_keys = 5\n[limiters.api]\nrules = [{ quota = "1/day", scope = "user" }]\n'
    policy += '[limiters.all]\nrules = [{ quota = "0/day", scope = "*" }]\n'
    policy += '[limiters.pair]\nrules = [{ quota = "5/day", scope = "realm" }]\n[limiters.plain]\nrules = ["1/day"]\n'
    server = serving(policy.replace("[server]\n", "[server]\nlargest_body = 1000000\n"))
    server.hit("api", {"user": "bob"}, 3)
    server.hit("all", None)
    page = look(server)
    refused = page.locator("#refused-body li")
    expect(refused).to_have_text(["user: bobrefused by api2", "everybody togetherrefused by all1"])
    expect(refused.get_by_role("button")).to_have_count(1)
    refused.get_by_role("button").click()
    expect(page.locator("#inspect").get_by_label("Key")).to_have_value('{"user":"bob"}')
    expect(usage(page, "api", "per-day-user")).to_contain_text("1 of 1 used")
    expect(page.locator("#inspect").get_by_role("heading", name="pair")).to_have_count(0)

    long_key = "long " * 30_000
    server.hit("plain", long_key[:400], 3)
    server.hit("plain", long_key, 4)
    for number, used in ((4, "1 of 1 used"), (3, "1 of 1 used")):
        refused.filter(has_text=f"plain{number - 1}").get_by_role("button").click()
        expect(usage(page, "plain", "per-day")).to_contain_text(used)
    page.get_by_role("button", name="Reset in plain").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    expect(usage(page, "plain", "per-day")).to_contain_text("0 of 1 used")
    assert server.post("/v1/limiters/plain/check", {"key": long_key[:400]})["remaining"] == 0
    assert server.post("/v1/limiters/plain/check", {"key": long_key})["allowed"] is False


# --- Try it ----------------------------------------------------------------------------------------------------------


def test_hits_and_checks_are_answered_in_a_sentence(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY))
    answer = submit(page, "Hit")
    expect(answer).to_contain_text("Admitted. 4 of 5 left in per-day, all of them back in 1 d")
    submit(page, "Check", cost=4)
    expect(answer).to_contain_text("Would be admitted. 0 of 5 left")
    submit(page, "Hit", cost=4)
    expect(answer).to_contain_text("Admitted. 0 of 5 left")
    submit(page, "Hit")
    expect(answer).to_contain_text(re.compile(r"Refused by per-day\. It would be admitted in (1 d|2[34] h)"))
    page.get_by_text("Answer as JSON").click()
    expect(page.locator("#try-json-text")).to_contain_text('"allowed": false')


def test_errors_of_the_server_are_shown(serving: Serving, look: Look, page_errors: PageErrors) -> None:
    server = serving(POLICY)
    page_errors.expect("the server responded with a status of 4")
    page = look(server)
    answer = submit(page, "Hit", cost=6)
    refused = httpx.post(f"{server.url}/v1/limiters/login/hit", json={"key": "alice", "cost": 6})
    assert refused.is_client_error
    expect(answer).to_have_text(refused.json()["detail"])


def test_a_hold_is_settled_or_released(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    page = look(server)
    expect(submit(page, "Hold", cost=4)).to_contain_text("Holding 4 units. 1 of 5 left")
    hold = page.locator("#try-hold")
    hold.get_by_label("True cost").fill("3")
    hold.get_by_role("button", name="Settle").click()
    expect(hold.get_by_role("status")).to_have_text("Settled at 3 of 4 units held.")
    expect(hold.get_by_role("button", name="Release")).to_be_disabled()
    assert server.post("/v1/limiters/login/check", {"key": "alice", "cost": 0})["remaining"] == 2

    submit(page, "Hold", cost=2)
    hold.get_by_role("button", name="Release").click()
    expect(hold.get_by_role("status")).to_have_text("Released: all 2 given back.")
    assert server.post("/v1/limiters/login/check", {"key": "alice", "cost": 0})["remaining"] == 2


def test_the_form_asks_for_every_scope_and_tier(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY))
    card(page, "api").get_by_role("button", name="Try api").click()
    form = page.locator("#try-form")
    expect(form.get_by_label("Limiter")).to_have_value("api")
    expect(form.get_by_label("user")).to_be_focused()
    form.get_by_label("user").fill("ada")
    form.get_by_label("Tier").select_option("pro")
    expect(submit(page, "Hit", limiter="api")).to_contain_text("999 of 1,000 left in daily")


@pytest.mark.parametrize("key", ["alice", 'it\'s $(not) a `command` \\ "quoted"', HOSTILE])
def test_the_curl_command_sends_the_same_request(serving: Serving, look: Look, key: str) -> None:
    server = serving(POLICY)
    page = look(server)
    page.locator("#try-form").get_by_label("Key").fill(key)
    page.locator("#try-form").get_by_label("Cost").fill("2")
    line = page.locator("#try-curl").text_content()
    assert line is not None
    command, url, header, content_type, data, body = shlex.split(line.replace("\\\n", ""))
    assert (command, header, content_type, data) == ("curl", "-H", "Content-Type: application/json", "-d")
    assert url == f"{server.url}/v1/limiters/login/hit"
    sent = httpx.post(url, content=body.encode(), headers={"Content-Type": "application/json"})
    assert sent.json()["remaining"] == 3
    assert server.post("/v1/limiters/login/check", {"key": key, "cost": 0})["remaining"] == 3


# --- Tokens ----------------------------------------------------------------------------------------------------------

GUARDED = (
    POLICY + token_table("root", "s3cret", "decide", "administer") + token_table("shop", "w3ak", "decide")
)


def test_the_page_asks_for_a_token_and_continues(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving(GUARDED, token="s3cret")
    server.hit("login", "alice", 2)
    page_errors.expect("status of 401")
    page = look(server, live=False)
    dialog = page.get_by_role("dialog", name="This server asks for a token")
    dialog.get_by_label("Token").fill("wrong")
    dialog.get_by_role("button", name="Use token").click()
    expect(dialog.get_by_role("alert")).to_have_text("The server did not accept that token.")
    dialog.get_by_label("Token").fill("s3cret")
    dialog.get_by_role("button", name="Use token").click()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(figure(page, "login", "total-admitted")).to_have_text("2")
    expect(page.locator("#try-curl")).to_contain_text('-H "Authorization: Bearer $HEADGATE_TOKEN"')
    expect(page.locator("#try-curl")).not_to_contain_text("s3cret")

    assert page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == (
        '[{"headgate.token":"s3cret"},{},""]'
    )
    look_again(page)
    page.get_by_role("button", name="Forget the token").click()
    expect(dialog).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_token_can_be_entered_after_the_dialog_was_dismissed(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving(GUARDED)
    page_errors.expect("status of 401")
    page = look(server, live=False)
    page.get_by_role("button", name="Not now").click()
    expect(page.locator("#connection")).to_have_text("Not connected")
    page.get_by_role("button", name="Enter a token").click()
    page.get_by_role("textbox", name="Token").fill("w3ak")
    page.get_by_role("textbox", name="Token").press("Enter")
    expect(page.locator("#connection")).to_have_text("Live")
    expect(card(page, "login")).to_be_visible()


def test_a_reset_without_permission_shows_the_reason(
    serving: Serving, look: Look, page_errors: PageErrors
) -> None:
    server = serving(GUARDED, token="w3ak")
    server.hit("login", "alice", 2)
    page_errors.expect("status of 401")
    page_errors.expect("status of 403")
    page = look(server, live=False)
    page.get_by_role("textbox", name="Token").fill("w3ak")
    page.get_by_role("textbox", name="Token").press("Enter")
    expect(page.locator("#connection")).to_have_text("Live")
    inspect(page, "alice")
    page.get_by_role("button", name="Reset in login").click()
    page.get_by_role("dialog").get_by_role("button", name="Reset").click()
    headers = {"Authorization": "Bearer w3ak"}
    refused = httpx.post(f"{server.url}/v1/limiters/login/reset", json={"key": "alice"}, headers=headers)
    assert refused.status_code == 403
    expect(page.locator("#inspect article", has_text="login").get_by_role("status")).to_have_text(
        refused.json()["detail"]
    )
    expect(usage(page, "login", "per-day")).to_contain_text("2 of 5 used")


# --- Hostile text ----------------------------------------------------------------------------------------------------


def test_names_and_keys_are_shown_as_text(serving: Serving, look: Look) -> None:
    toml_name = HOSTILE.replace('"', '\\"')
    names = [toml_name, "constructor", "__proto__", "x" * 200]
    policy = "[server]\ntop_keys = 9\n" + "".join(
        f'[limiters."{name}"]\nrules = [{{ quota = "1/day", name = "<b>rule</b>" }}]\n' for name in names
    )
    server = serving(policy)
    for name in [HOSTILE, "constructor", "__proto__", "x" * 200]:
        server.hit(name, HOSTILE, 3)
    page = look(server, viewport={"width": 360, "height": 740})
    for name in [HOSTILE, "constructor", "__proto__", "x" * 200]:
        card(page, name).scroll_into_view_if_needed()
        expect(figure(page, name, "total-admitted")).to_have_text("1")
        expect(figure(page, name, "total-refused")).to_have_text("2")
    expect(page.locator("#refused-body li").first).to_contain_text(HOSTILE)
    inspect(page, HOSTILE)
    expect(usage(page, HOSTILE, "<b>rule</b>")).to_contain_text("1 of 1 used")
    page.locator("#try-form").get_by_label("Key").fill(HOSTILE)
    expect(submit(page, "Hit", limiter=HOSTILE)).to_contain_text("Refused by <b>rule</b>.")
    assert page.locator("main img, main b b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 360


# --- Accessibility ---------------------------------------------------------------------------------------------------

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


def violations(page: Page) -> list[Any]:
    """Return a short description of the problems that axe finds in the current page."""
    found = Axe().run(page).response["violations"]
    return [(each["id"], each["help"], [node["target"] for node in each["nodes"]]) for each in found]


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_problems(serving: Serving, look: Look, scheme: str, viewport: dict[str, int]) -> None:
    server = serving(POLICY, demo=True)
    server.hit("login", "alice", 7)
    server.hit("api", {"user": "alice"}, 7)
    page = look(server, color_scheme=scheme, viewport=viewport)
    expect(figure(page, "login", "total-refused")).to_have_text("2")
    card(page, "login").get_by_text("Figures as a table").click()
    inspect(page, "alice")
    expect(usage(page, "login", "per-day")).to_be_visible()
    expect(submit(page, "Hold", limiter="api")).to_contain_text("Holding")
    page.get_by_text("Answer as JSON").click()
    expect(page.locator("#try-json-text")).to_be_visible()
    server.policy_file.write_text("[limiters.login]\n", encoding="utf-8")
    expect(page.get_by_role("alert")).to_be_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]

    page.get_by_role("button", name="Reset in login").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_problems_in_the_token_dialog(
    serving: Serving, look: Look, page_errors: PageErrors, scheme: str
) -> None:
    page_errors.expect("status of 401")
    page = look(serving(GUARDED), live=False, color_scheme=scheme)
    page.get_by_role("textbox", name="Token").fill("wrong")
    page.get_by_role("textbox", name="Token").press("Enter")
    expect(page.get_by_role("dialog").get_by_role("alert")).not_to_be_empty()
    assert violations(page) == []
    page.get_by_role("button", name="Not now").click()
    expect(page.locator("#connection")).to_have_text("Not connected")
    assert violations(page) == []


def test_everything_works_with_the_keyboard(serving: Serving, look: Look) -> None:
    server = serving(POLICY)
    server.hit("login", "alice", 5)
    page = look(server)

    def press_until(target: Locator, key: str = "Tab") -> None:
        for _ in range(60):
            page.keyboard.press(key)
            if target.evaluate("node => node === document.activeElement"):
                return
        pytest.fail(f"{key} does not lead to {target}")

    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the figures")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()

    press_until(card(page, "login").get_by_role("slider"))
    page.keyboard.press("ArrowLeft")
    # One bar back, or two if a new bar was added in between.
    expect(card(page, "login").get_by_role("slider")).to_have_attribute("aria-valuenow", re.compile("5[78]"))

    press_until(page.locator("#inspect").get_by_label("Key"))
    page.keyboard.type("alice")
    page.keyboard.press("Enter")
    expect(usage(page, "login", "per-day")).to_contain_text("5 of 5 used")
    reset = page.get_by_role("button", name="Reset in login")
    press_until(reset)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(reset).to_be_focused()
    page.keyboard.press("Enter")
    press_until(page.get_by_role("dialog").get_by_role("button", name="Reset"))
    page.keyboard.press("Enter")
    expect(usage(page, "login", "per-day")).to_contain_text("0 of 5 used")

    press_until(page.locator("#try-form").get_by_role("radio", name="Hit"))
    page.keyboard.press("ArrowRight")
    expect(page.locator("#try-form").get_by_role("radio", name="Check")).to_be_checked()
    press_until(page.get_by_role("button", name="Ask"))
    page.keyboard.press("Space")
    expect(page.locator("#try-answer")).to_contain_text("Would be admitted.")

    press_until(page.get_by_role("button", name="Dark colours"), "Shift+Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Dark colours")).to_have_attribute("aria-pressed", "true")


def test_the_chosen_scheme_is_remembered(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY), color_scheme="light")
    assert ground(page) == LIGHT_GROUND
    page.get_by_role("button", name="Dark colours").click()
    assert ground(page) != LIGHT_GROUND
    look_again(page)
    assert ground(page) != LIGHT_GROUND
    page.get_by_role("button", name="Dark colours").click()
    assert ground(page) == LIGHT_GROUND


LIGHT_GROUND = "rgb(245, 247, 249)"


def ground(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))


def test_reduced_motion_disables_animations(serving: Serving, look: Look) -> None:
    page = look(serving(POLICY), reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0


def test_durations_are_shown_in_two_units(serving: Serving, look: Look) -> None:
    words = {
        0.5: "0.5 s",
        12.345: "12.4 s",
        59.96: "1 min",
        60: "1 min",
        60.1: "1 min 1 s",
        3600: "1 h",
        3661: "1 h 1 min",
        86400: "1 d",
        90000: "1 d 1 h",
    }
    page = look(serving(POLICY))
    told = page.evaluate(
        "async (all) => { const { duration } = await import('/static/words.js'); return all.map(duration); }",
        list(words),
    )
    assert told == list(words.values())
