"""The dashboard in a real browser, with real processes: its panels, its actions, its layout and its accessibility."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.service.dashboard.dashboard_service import basic_service, full_service
from tests.service.harness import ADMIN, DECISION

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")

TIMEOUT = 20_000  # milliseconds, for a busy machine
PHONE = {"width": 360, "height": 740}
HOSTILE = '<img src=x onerror="window.injected=1"><script>window.injected=1</script>'


@pytest.fixture(scope="module")
def basic(tmp_path_factory):
    with basic_service(tmp_path_factory.mktemp("basic")) as service:
        yield service


@pytest.fixture
def full(tmp_path):
    with full_service(tmp_path) as service:
        yield service


def wait_until_live(page):
    expect(page.locator("#health-text")).to_have_text("live", timeout=TIMEOUT)


def wait_for_responses(page, count):
    """Wait for further responses of /v1/overview."""
    for _ in range(count):
        with page.expect_response("**/v1/overview*", timeout=TIMEOUT):
            pass


def row(page, table, text):
    return page.locator(f"#{table} tbody tr").filter(has_text=text)


def look_up(page, policy, key):
    page.locator("#search-policy").select_option(policy)
    page.locator("#search-key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#key")).to_be_visible()


# ---- panels ----------------------------------------------------------------------------------------------------------


def test_decisions_are_shown_without_layout_shifts(basic, open_page):
    page = open_page(basic.url)
    wait_until_live(page)
    assert basic.acquire("login", "203.0.113.1", 7) == [True] * 5 + [False] * 2
    basic.acquire("api", "user:1", 20)
    denial = row(page, "denials", "203.0.113.1").first
    expect(denial).to_contain_text("exceeded 1m", timeout=TIMEOUT)
    near = row(page, "near", "203.0.113.1")
    expect(near).to_contain_text("5 / 1m")
    expect(near).to_contain_text("100 %")
    expect(row(page, "policies", "login")).to_contain_text(re.compile(r"\(\d+ %\)"))
    expect(page.locator("#now-median")).to_have_text(re.compile(r"µs|ms|s"), timeout=TIMEOUT)
    expect(page.locator("#chart-decisions path.stroke.s-admitted")).to_have_attribute("d", re.compile("^M"))
    page.get_by_role("button", name="login").click()  # only this policy in the chart
    expect(page.locator("#note-decisions")).to_have_text("login")
    page.get_by_role("button", name="login").click()
    expect(page.locator("#note-decisions")).to_have_text("all policies")
    expect(row(page, "state", "Store").first).to_contain_text("available")
    wait_for_responses(page, 3)
    assert page.evaluate("window.shifts") == []


def test_a_panel_appears_only_when_its_component_is_used(basic, open_page):
    page = open_page(basic.url)
    wait_until_live(page)
    wait_for_responses(page, 1)
    assert page.locator("#face-panels section").count() == 0
    expect(row(page, "state", "Bus")).to_contain_text("not configured")


def test_budgets_sources_and_swarm_are_shown_on_desktop_and_phone(full, open_page):
    page = open_page(full.url)
    wait_until_live(page)
    expect(row(page, "budgets-0", "minute")).to_contain_text(re.compile(r"\d+ of 40"))
    expect(row(page, "budgets-0", "month")).to_contain_text(re.compile("runs out in|sufficient|not in use"))
    expect(row(page, "sources-0", "quotes")).to_contain_text("of 30", timeout=TIMEOUT)
    expect(row(page, "sources-1", "prices")).to_contain_text("status 200", timeout=TIMEOUT)
    expect(row(page, "sources-1", "rates")).to_contain_text(re.compile("in 5[89] min|in 1 h"), timeout=TIMEOUT)
    agent = row(page, "swarm-0", "agent-2").filter(has_text="openai")
    expect(agent).to_contain_text("100 of 100", timeout=TIMEOUT)
    full.agents[0].announce_reduced("openai", "received 429 response")
    reduced = row(page, "swarm-1", "received 429 response").first
    expect(reduced).to_contain_text("openai", timeout=TIMEOUT)
    expect(reduced).to_contain_text("agent-1")
    expect(agent).to_contain_text("50 of 100", timeout=TIMEOUT)
    marker = page.locator(".resource", has_text="openai").locator(".markers .marker").first
    expect(marker).to_have_attribute("title", re.compile("to 50: received 429 response"))
    expect(row(page, "state", "Bus")).to_contain_text("connected")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert accessibility_violations(page) == []
    page.set_viewport_size(PHONE)
    assert overflowing_elements(page) == []


def test_an_unreachable_service_is_reported(basic, chromium):
    page = chromium.new_page()  # without open_page: the browser logs an error for each lost connection
    try:
        page.goto(basic.url)
        wait_until_live(page)
        page.route("**/v1/overview*", lambda route: route.abort())
        expect(page.locator("#notice")).to_contain_text("does not respond", timeout=TIMEOUT)
        expect(page.locator("#health-text")).to_have_text("no response")
        page.unroute("**/v1/overview*")
        wait_until_live(page)
        expect(page.locator("#notice")).to_be_empty()
    finally:
        page.close()


# ---- actions ---------------------------------------------------------------------------------------------------------


def test_a_key_is_looked_up_reset_blocked_and_unblocked(basic, open_page):
    basic.acquire("login", "203.0.113.2", 5)
    page = open_page(basic.url)
    wait_until_live(page)
    look_up(page, "login", "203.0.113.2")
    expect(page.locator("#key-title")).to_have_text("203.0.113.2")
    expect(row(page, "key-limits", "5 / 1m")).to_contain_text("5 of 5")
    expect(row(page, "key-limits", "20 / 1h")).to_contain_text("5 of 20")
    page.locator("#key-reset").click()
    expect(page.locator("#key-status")).to_contain_text("Reset")
    expect(row(page, "key-limits", "5 / 1m")).to_contain_text("0 of 5")
    page.locator("#key-block-seconds").select_option("3600")
    page.locator("#key-block").click()
    expect(page.locator("#key-status")).to_have_text("Blocked for 1 h.")
    expect(page.locator("#key-policy")).to_contain_text(re.compile("blocked for another (1 h|59 min)"), timeout=TIMEOUT)
    assert basic.acquire("login", "203.0.113.2") == [False]
    page.locator("#key-unblock").click()
    expect(page.locator("#key-status")).to_have_text("Unblocked.")
    assert basic.acquire("login", "203.0.113.2") == [True]


def test_a_click_on_a_denied_key_opens_its_dialog(basic, open_page):
    parts = ["tenant", "a/b"]
    body = {"policy": "login", "key": parts, "cost": 6}
    assert basic.http.post("/v1/acquire", json=body).json()["allowed"] is False
    page = open_page(basic.url)
    wait_until_live(page)
    shown = "tenant \u203a a/b"
    row(page, "denials", shown).get_by_role("button").first.click()
    expect(page.locator("#key-title")).to_have_text(shown)
    expect(row(page, "key-limits", "5 / 1m")).to_contain_text("0 of 5")
    page.keyboard.press("Escape")
    look_up(page, "login", '["tenant", "a/b"]')
    expect(page.locator("#key-title")).to_have_text(shown)


def test_keys_and_policies_are_never_interpreted_as_markup(tmp_path, open_page):
    policies = f"policies: {{'{HOSTILE}': 1/1h}}\n"
    with basic_service(tmp_path, policies) as service:
        assert service.acquire(HOSTILE, HOSTILE, 2) == [True, False]
        page = open_page(service.url)
        wait_until_live(page)
        expect(row(page, "denials", HOSTILE).get_by_role("button")).to_have_text(HOSTILE)
        expect(row(page, "policies", HOSTILE).locator(".name")).to_have_text(HOSTILE)
        look_up(page, HOSTILE, HOSTILE)
        expect(page.locator("#key-title")).to_have_text(HOSTILE)
        expect(row(page, "key-limits", "1 / 1h")).to_contain_text("1 of 1")
        assert page.evaluate("window.injected") is None
        assert page.locator("main img, dialog img, main script").count() == 0


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_the_token_is_requested_stored_in_the_tab_and_sent(tmp_path, open_page):
    tokens = {"TIDEGATE_DECISION_TOKEN": DECISION, "TIDEGATE_ADMIN_TOKEN": ADMIN}
    with basic_service(tmp_path, **tokens) as service:
        page = open_page(service.url)
        expect(page.locator("#token")).to_be_visible()
        expect(page.locator("#policies tbody tr")).to_have_count(0)
        page.locator("#token-value").fill(DECISION)
        page.keyboard.press("Enter")
        wait_until_live(page)
        expect(row(page, "policies", "login")).to_be_visible()
        look_up(page, "login", "203.0.113.3")
        page.locator("#key-reset").click()
        expect(page.locator("#key-status")).to_contain_text("this needs the admin token")
        expect(page.locator("#token")).to_be_visible()
        page.locator("#token-value").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.locator("#token")).to_be_hidden()
        page.locator("#key-reset").click()
        expect(page.locator("#key-status")).to_contain_text("Reset")
        assert page.evaluate("Object.values(sessionStorage)") == [ADMIN]
        assert page.evaluate("Object.values(localStorage)") == []
        assert ADMIN not in page.url
        assert page.context.cookies() == []
        # The browser logs an error for the 403 response.
        assert [error for error in open_page.errors if "403" not in error] == []
        open_page.errors.clear()


# ---- keyboard, phone, themes, accessibility --------------------------------------------------------------------------


def test_the_page_can_be_used_by_keyboard(basic, open_page):
    page = open_page(basic.url)
    wait_until_live(page)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#search-key")).to_be_focused()
    page.keyboard.type("user:9/x")
    expect(page.locator("#search-key")).to_have_value("user:9/x")
    page.keyboard.press("Enter")
    expect(page.locator("#key")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator("#search-key")).to_be_focused()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    page.keyboard.press("Tab")
    assert page.evaluate(outline) == "solid"


def test_the_theme_follows_the_system_until_the_user_selects_one(basic, open_page):
    page = open_page(basic.url, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert light != dark
    for label, colour in (("Theme: light", light), ("Theme: dark", dark)):
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text(label)
        assert page.evaluate(background) == colour
    page.reload()
    assert page.evaluate(background) == dark
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: auto")
    assert page.evaluate(background) == light


def test_the_page_does_not_scroll_sideways_on_a_phone(basic, open_page):
    basic.acquire("login", "a-key-that-is-much-longer-than-a-phone-is-wide:" + "x" * 200, 6)
    page = open_page(basic.url, viewport=PHONE, has_touch=True, is_mobile=True)
    wait_until_live(page)
    expect(row(page, "denials", "a-key-that").first).to_be_visible()
    wait_for_responses(page, 2)
    assert overflowing_elements(page) == []
    assert page.evaluate("window.shifts") == []


def overflowing_elements(page):
    """Return the elements that are wider than the screen of a phone."""
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    return page.evaluate("""[...document.querySelectorAll("main section, header > *")]
        .filter((each) => each.getBoundingClientRect().right > innerWidth)
        .map((each) => each.outerHTML.slice(0, 80))""")


def test_axe_finds_no_accessibility_violations(basic, open_page):
    basic.acquire("login", "203.0.113.4", 6)
    page = open_page(basic.url, color_scheme="light")
    wait_until_live(page)
    expect(row(page, "denials", "203.0.113.4").first).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert accessibility_violations(page) == []
    look_up(page, "login", "203.0.113.4")
    page.locator("#key-reset").click()
    expect(page.locator("#key-status")).to_contain_text("Reset")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert accessibility_violations(page) == []
    page.keyboard.press("Escape")
    page.locator("#token-open").click()
    expect(page.locator("#token")).to_be_visible()
    assert accessibility_violations(page) == []


def accessibility_violations(page):
    """Return the violations that axe finds, of any impact, with their elements."""
    found = axe_playwright.Axe().run(page).response["violations"]
    return [(each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]]) for each in found]
