"""The dashboard page in a real browser, with real processes: data, actions, tokens, layout, accessibility."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.service.dashboard import running_service
from tests.service.harness import ADMIN, DECISION

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")

TIMEOUT = 20_000  # milliseconds on a busy machine
PHONE = {"width": 360, "height": 740}
MARKUP = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with running_service.without_components(tmp_path_factory.mktemp("plain")) as service:
        yield service


@pytest.fixture
def complete(tmp_path):
    with running_service.with_all_components(tmp_path) as service:
        yield service


def wait_until_live(page):
    expect(page.locator("#health-text")).to_have_text("live", timeout=TIMEOUT)


def wait_for_updates(page, count):
    """Wait for so many further updates of the page."""
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


# ---- data ------------------------------------------------------------------------------------------------------------


def test_decisions_are_shown_without_layout_shifts(plain, open_page):
    page = open_page(plain.url)
    wait_until_live(page)
    assert plain.acquire("login", "203.0.113.1", 7) == [True] * 5 + [False] * 2
    plain.acquire("api", "user:1", 20)
    denial = row(page, "denials", "203.0.113.1").first
    expect(denial).to_contain_text("over 1m", timeout=TIMEOUT)
    near = row(page, "near", "203.0.113.1")
    expect(near).to_contain_text("5 / 1m")
    expect(near).to_contain_text("100 %")
    expect(row(page, "policies", "login")).to_contain_text(re.compile(r"\(\d+ %\)"))
    expect(page.locator("#now-median")).to_have_text(re.compile(r"µs|ms|s"), timeout=TIMEOUT)
    expect(page.locator("#chart-decisions path.stroke.s-admitted")).to_have_attribute("d", re.compile("^M"))
    page.get_by_role("button", name="login").click()  # the chart shows only this policy
    expect(page.locator("#note-decisions")).to_have_text("login")
    page.get_by_role("button", name="login").click()
    expect(page.locator("#note-decisions")).to_have_text("all policies")
    expect(row(page, "state", "Store").first).to_contain_text("answers")
    wait_for_updates(page, 3)
    assert page.evaluate("window.shifts") == []


def test_an_empty_panel_names_the_setting_that_fills_it(plain, open_page):
    page = open_page(plain.url)
    wait_until_live(page)
    for table, words in (("budgets", "budget: true"), ("sources", "providers"), ("agents", "swarm:")):
        note = page.locator(f".body:has(> #{table}) .empty")
        expect(note).to_be_visible()
        expect(note).to_contain_text(words)
    expect(row(page, "state", "Bus")).to_contain_text("none is set")


def test_budgets_sources_and_a_swarm_are_shown_also_on_a_phone(complete, open_page):
    page = open_page(complete.url)
    wait_until_live(page)
    expect(row(page, "budgets", "minute")).to_contain_text(re.compile(r"\d+ of 40"))
    expect(row(page, "budgets", "month")).to_contain_text(re.compile("runs out in|lasts|not in use"))
    expect(row(page, "providers", "quotes")).to_contain_text("of 30", timeout=TIMEOUT)
    expect(row(page, "sources", "prices")).to_contain_text("status 200", timeout=TIMEOUT)
    expect(row(page, "sources", "rates")).to_contain_text(re.compile("in 5[89] min|in 1 h"), timeout=TIMEOUT)
    agent = row(page, "agents", "agent-2").filter(has_text="openai")
    expect(agent).to_contain_text("100 of 100", timeout=TIMEOUT)
    complete.agents[0].announce_reduced("openai", "received 429 response")
    reduced = row(page, "reductions", "received 429 response").first
    expect(reduced).to_contain_text("openai", timeout=TIMEOUT)
    expect(reduced).to_contain_text("agent-1")
    expect(agent).to_contain_text("50 of 100", timeout=TIMEOUT)
    mark = page.locator(".resource", has_text="openai").locator(".marks .mark").first
    expect(mark).to_have_attribute("title", re.compile("to 50: received 429 response"))
    expect(row(page, "state", "Bus")).to_contain_text("connected")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert axe_violations(page) == []
    page.set_viewport_size(PHONE)
    assert overflowing(page) == []


def test_an_unreachable_service_is_reported(plain, chromium):
    page = chromium.new_page()  # not `open_page`: the browser logs the lost connection
    try:
        page.goto(plain.url)
        wait_until_live(page)
        page.route("**/v1/overview*", lambda route: route.abort())
        expect(page.locator("#notice")).to_contain_text("does not answer", timeout=TIMEOUT)
        expect(page.locator("#health-text")).to_have_text("no answer")
        page.unroute("**/v1/overview*")
        wait_until_live(page)
        expect(page.locator("#notice")).to_be_empty()
    finally:
        page.close()


# ---- actions ---------------------------------------------------------------------------------------------------------


def test_a_key_is_looked_up_reset_blocked_and_unblocked(plain, open_page):
    plain.acquire("login", "203.0.113.2", 5)
    page = open_page(plain.url)
    wait_until_live(page)
    look_up(page, "login", "203.0.113.2")
    expect(page.locator("#key-title")).to_have_text("203.0.113.2")
    expect(row(page, "uses", "5 / 1m")).to_contain_text("5 of 5")
    expect(row(page, "uses", "20 / 1h")).to_contain_text("5 of 20")
    page.locator("#key-reset").click()
    expect(page.locator("#key-said")).to_contain_text("Reset")
    expect(row(page, "uses", "5 / 1m")).to_contain_text("0 of 5")
    page.locator("#key-for").select_option("3600")
    page.locator("#key-block").click()
    expect(page.locator("#key-said")).to_have_text("Blocked for 1 h.")
    expect(page.locator("#key-policy")).to_contain_text(re.compile("blocked for another (1 h|59 min)"), timeout=TIMEOUT)
    assert plain.acquire("login", "203.0.113.2") == [False]
    page.locator("#key-unblock").click()
    expect(page.locator("#key-said")).to_have_text("Not blocked any more.")
    assert plain.acquire("login", "203.0.113.2") == [True]


def test_a_click_on_a_denial_opens_its_key(plain, open_page):
    parts = ["tenant", "a/b"]
    body = {"policy": "login", "key": parts, "cost": 6}
    assert plain.http.post("/v1/acquire", json=body).json()["allowed"] is False
    page = open_page(plain.url)
    wait_until_live(page)
    shown = "tenant \u203a a/b"
    row(page, "denials", shown).get_by_role("button").first.click()
    expect(page.locator("#key-title")).to_have_text(shown)
    expect(row(page, "uses", "5 / 1m")).to_contain_text("0 of 5")
    page.keyboard.press("Escape")
    look_up(page, "login", '["tenant", "a/b"]')
    expect(page.locator("#key-title")).to_have_text(shown)


def test_keys_and_policies_are_escaped(tmp_path, open_page):
    policies = f"policies: {{'{MARKUP}': 1/1h}}\n"
    with running_service.without_components(tmp_path, policies) as service:
        assert service.acquire(MARKUP, MARKUP, 2) == [True, False]
        page = open_page(service.url)
        wait_until_live(page)
        expect(row(page, "denials", MARKUP).get_by_role("button")).to_have_text(MARKUP)
        expect(row(page, "policies", MARKUP).locator(".name")).to_have_text(MARKUP)
        look_up(page, MARKUP, MARKUP)
        expect(page.locator("#key-title")).to_have_text(MARKUP)
        expect(row(page, "uses", "1 / 1h")).to_contain_text("1 of 1")
        assert page.evaluate("window.harmed") is None
        assert page.locator("main img, dialog img, main script").count() == 0


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_the_page_requests_a_token_and_keeps_it_for_the_tab(tmp_path, open_page):
    tokens = {"TIDEGATE_DECISION_TOKEN": DECISION, "TIDEGATE_ADMIN_TOKEN": ADMIN}
    with running_service.without_components(tmp_path, **tokens) as service:
        page = open_page(service.url)
        expect(page.locator("#token")).to_be_visible()
        expect(page.locator("#policies tbody tr")).to_have_count(0)
        page.locator("#token-value").fill(DECISION)
        page.keyboard.press("Enter")
        wait_until_live(page)
        expect(row(page, "policies", "login")).to_be_visible()
        look_up(page, "login", "203.0.113.3")
        page.locator("#key-reset").click()
        expect(page.locator("#key-said")).to_contain_text("this needs the admin token")
        expect(page.locator("#token")).to_be_visible()
        page.locator("#token-value").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.locator("#token")).to_be_hidden()
        page.locator("#key-reset").click()
        expect(page.locator("#key-said")).to_contain_text("Reset")
        assert page.evaluate("Object.values(sessionStorage)") == [ADMIN]
        assert page.evaluate("Object.values(localStorage)") == []
        assert ADMIN not in page.url
        assert page.context.cookies() == []
        # The browser itself logs the one response with a 403.
        assert [problem for problem in open_page.problems if "403" not in problem] == []
        open_page.problems.clear()


# ---- keyboard, phone, light and dark ---------------------------------------------------------------------------------


def test_the_page_can_be_used_by_keyboard(plain, open_page):
    page = open_page(plain.url)
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


def test_the_theme_follows_the_system_until_the_user_chooses_one(plain, open_page):
    page = open_page(plain.url, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert light != dark
    for words, colour in (("Theme: light", light), ("Theme: dark", dark)):
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text(words)
        assert page.evaluate(background) == colour
    page.reload()
    assert page.evaluate(background) == dark
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: auto")
    assert page.evaluate(background) == light


def test_a_phone_scrolls_only_vertically(plain, open_page):
    plain.acquire("login", "a-key-that-is-much-longer-than-a-phone-is-wide:" + "x" * 200, 6)
    page = open_page(plain.url, viewport=PHONE, has_touch=True, is_mobile=True)
    wait_until_live(page)
    expect(row(page, "denials", "a-key-that").first).to_be_visible()
    wait_for_updates(page, 2)
    assert overflowing(page) == []
    assert page.evaluate("window.shifts") == []


def overflowing(page):
    """Return the elements that are wider than a phone."""
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    return page.evaluate("""[...document.querySelectorAll("main section, header > *")]
        .filter((each) => each.getBoundingClientRect().right > innerWidth)
        .map((each) => each.outerHTML.slice(0, 80))""")


def test_axe_finds_no_accessibility_violations(plain, open_page):
    plain.acquire("login", "203.0.113.4", 6)
    page = open_page(plain.url, color_scheme="light")
    wait_until_live(page)
    expect(row(page, "denials", "203.0.113.4").first).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert axe_violations(page) == []
    look_up(page, "login", "203.0.113.4")
    page.locator("#key-reset").click()
    expect(page.locator("#key-said")).to_contain_text("Reset")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert axe_violations(page) == []
    page.keyboard.press("Escape")
    page.locator("#token-open").click()
    expect(page.locator("#token")).to_be_visible()
    assert axe_violations(page) == []


def axe_violations(page):
    """Return all violations that axe finds, also minor ones, with their elements."""
    violations = axe_playwright.Axe().run(page).response["violations"]
    return [(each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]]) for each in violations]
