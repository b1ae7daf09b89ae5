"""The page in a real browser, against real processes: what it shows, what can be done on it, and that it stays calm."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.service.dashboard import stage as stages
from tests.service.harness import ADMIN, DECISION

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")

LONG = 20_000  # milliseconds on a busy machine
PHONE = {"width": 360, "height": 740}
HOSTILE = '<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with stages.plain(tmp_path_factory.mktemp("plain")) as stage:
        yield stage


@pytest.fixture
def whole(tmp_path):
    with stages.integer(tmp_path) as stage:
        yield stage


def live(page):
    expect(page.locator("#health-text")).to_have_text("live", timeout=LONG)


def answers(page, more):
    """Wait for so many further answers."""
    for _ in range(more):
        with page.expect_response("**/v1/overview*", timeout=LONG):
            pass


def row(page, table, words):
    return page.locator(f"#{table} tbody tr").filter(has_text=words)


def look_up(page, policy, key):
    page.locator("#search-policy").select_option(policy)
    page.locator("#search-key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#key")).to_be_visible()


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_what_happens_is_shown_and_nothing_moves(plain, visit):
    page = visit(plain.url)
    live(page)
    assert plain.acquire("login", "203.0.113.1", 7) == [True] * 5 + [False] * 2
    plain.acquire("api", "user:1", 20)
    denial = row(page, "denials", "203.0.113.1").first
    expect(denial).to_contain_text("over 1m", timeout=LONG)
    near = row(page, "near", "203.0.113.1")
    expect(near).to_contain_text("5 / 1m")
    expect(near).to_contain_text("100 %")
    expect(row(page, "policies", "login")).to_contain_text(re.compile(r"\(\d+ %\)"))
    expect(page.locator("#now-median")).to_have_text(re.compile(r"µs|ms|s"), timeout=LONG)
    expect(page.locator("#chart-decisions path.stroke.s-admitted")).to_have_attribute("d", re.compile("^M"))
    page.get_by_role("button", name="login").click()  # alone in the chart
    expect(page.locator("#note-decisions")).to_have_text("login")
    page.get_by_role("button", name="login").click()
    expect(page.locator("#note-decisions")).to_have_text("all policies")
    expect(row(page, "state", "Store").first).to_contain_text("answers")
    answers(page, 3)
    assert page.evaluate("window.shifts") == []


def test_a_panel_without_data_says_what_would_fill_it(plain, visit):
    page = visit(plain.url)
    live(page)
    for table, words in (("budgets", "budget: true"), ("sources", "providers"), ("agents", "swarm:")):
        note = page.locator(f".body:has(> #{table}) .empty")
        expect(note).to_be_visible()
        expect(note).to_contain_text(words)
    expect(row(page, "state", "Bus")).to_contain_text("none is set")


def test_budgets_sources_and_a_swarm_are_shown_on_a_phone_too(whole, visit):
    page = visit(whole.url)
    live(page)
    expect(row(page, "budgets", "minute")).to_contain_text(re.compile(r"\d+ of 40"))
    expect(row(page, "budgets", "month")).to_contain_text(re.compile("runs out in|lasts|not in use"))
    expect(row(page, "providers", "quotes")).to_contain_text("of 30", timeout=LONG)
    expect(row(page, "sources", "prices")).to_contain_text("status 200", timeout=LONG)
    expect(row(page, "sources", "rates")).to_contain_text(re.compile("in 5[89] min|in 1 h"), timeout=LONG)
    agent = row(page, "agents", "agent-2").filter(has_text="openai")
    expect(agent).to_contain_text("100 of 100", timeout=LONG)
    whole.agents[0].announce_reduced("openai", "received 429 response")
    reduced = row(page, "reductions", "received 429 response").first
    expect(reduced).to_contain_text("openai", timeout=LONG)
    expect(reduced).to_contain_text("agent-1")
    expect(agent).to_contain_text("50 of 100", timeout=LONG)
    mark = page.locator(".resource", has_text="openai").locator(".marks .mark").first
    expect(mark).to_have_attribute("title", re.compile("to 50: received 429 response"))
    expect(row(page, "state", "Bus")).to_contain_text("connected")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour half way
        assert findings(page) == []
    page.set_viewport_size(PHONE)
    assert beyond(page) == []


def test_a_service_that_does_not_answer_is_said_so(plain, chromium):
    page = chromium.new_page()  # what a browser logs of a lost connection is not ours
    try:
        page.goto(plain.url)
        live(page)
        page.route("**/v1/overview*", lambda route: route.abort())
        expect(page.locator("#notice")).to_contain_text("does not answer", timeout=LONG)
        expect(page.locator("#health-text")).to_have_text("no answer")
        page.unroute("**/v1/overview*")
        live(page)
        expect(page.locator("#notice")).to_be_empty()
    finally:
        page.close()


# ---- what can be done ------------------------------------------------------------------------------------------------


def test_a_key_is_looked_up_reset_blocked_and_unblocked(plain, visit):
    plain.acquire("login", "203.0.113.2", 5)
    page = visit(plain.url)
    live(page)
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
    expect(page.locator("#key-policy")).to_contain_text(re.compile("blocked for another (1 h|59 min)"), timeout=LONG)
    assert plain.acquire("login", "203.0.113.2") == [False]
    page.locator("#key-unblock").click()
    expect(page.locator("#key-said")).to_have_text("Not blocked any more.")
    assert plain.acquire("login", "203.0.113.2") == [True]


def test_a_denied_key_is_one_click_away(plain, visit):
    parts = ["tenant", "a/b"]
    body = {"policy": "login", "key": parts, "cost": 6}
    assert plain.http.post("/v1/acquire", json=body).json()["allowed"] is False
    page = visit(plain.url)
    live(page)
    shown = "tenant \u203a a/b"
    row(page, "denials", shown).get_by_role("button").first.click()
    expect(page.locator("#key-title")).to_have_text(shown)
    expect(row(page, "uses", "5 / 1m")).to_contain_text("0 of 5")
    page.keyboard.press("Escape")
    look_up(page, "login", '["tenant", "a/b"]')
    expect(page.locator("#key-title")).to_have_text(shown)


def test_keys_and_policies_are_never_markup(tmp_path, visit):
    policies = f"policies: {{'{HOSTILE}': 1/1h}}\n"
    with stages.plain(tmp_path, policies) as stage:
        assert stage.acquire(HOSTILE, HOSTILE, 2) == [True, False]
        page = visit(stage.url)
        live(page)
        expect(row(page, "denials", HOSTILE).get_by_role("button")).to_have_text(HOSTILE)
        expect(row(page, "policies", HOSTILE).locator(".name")).to_have_text(HOSTILE)
        look_up(page, HOSTILE, HOSTILE)
        expect(page.locator("#key-title")).to_have_text(HOSTILE)
        expect(row(page, "uses", "1 / 1h")).to_contain_text("1 of 1")
        assert page.evaluate("window.harmed") is None
        assert page.locator("main img, dialog img, main script").count() == 0


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_kept_in_the_tab_and_sent(tmp_path, visit):
    tokens = {"TIDEGATE_DECISION_TOKEN": DECISION, "TIDEGATE_ADMIN_TOKEN": ADMIN}
    with stages.plain(tmp_path, **tokens) as stage:
        page = visit(stage.url)
        expect(page.locator("#token")).to_be_visible()
        expect(page.locator("#policies tbody tr")).to_have_count(0)
        page.locator("#token-value").fill(DECISION)
        page.keyboard.press("Enter")
        live(page)
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
        # The browser itself says so of the one answer that was a 403.
        assert [said for said in visit.complaints if "403" not in said] == []
        visit.complaints.clear()


# ---- by keyboard, on a phone, light and dark -------------------------------------------------------------------------


def test_it_can_be_used_by_keyboard(plain, visit):
    page = visit(plain.url)
    live(page)
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


def test_the_theme_follows_the_system_until_it_is_chosen(plain, visit):
    page = visit(plain.url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert light != dark
    for words, colour in (("Theme: light", light), ("Theme: dark", dark)):
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text(words)
        assert page.evaluate(ground) == colour
    page.reload()
    assert page.evaluate(ground) == dark
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: auto")
    assert page.evaluate(ground) == light


def test_a_phone_scrolls_in_one_direction_only(plain, visit):
    plain.acquire("login", "a-key-that-is-much-longer-than-a-phone-is-wide:" + "x" * 200, 6)
    page = visit(plain.url, viewport=PHONE, has_touch=True, is_mobile=True)
    live(page)
    expect(row(page, "denials", "a-key-that").first).to_be_visible()
    answers(page, 2)
    assert beyond(page) == []
    assert page.evaluate("window.shifts") == []


def beyond(page):
    """List what is wider than a phone."""
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    return page.evaluate("""[...document.querySelectorAll("main section, header > *")]
        .filter((each) => each.getBoundingClientRect().right > innerWidth)
        .map((each) => each.outerHTML.slice(0, 80))""")


def test_axe_finds_nothing(plain, visit):
    plain.acquire("login", "203.0.113.4", 6)
    page = visit(plain.url, color_scheme="light")
    live(page)
    expect(row(page, "denials", "203.0.113.4").first).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour half way
        assert findings(page) == []
    look_up(page, "login", "203.0.113.4")
    page.locator("#key-reset").click()
    expect(page.locator("#key-said")).to_contain_text("Reset")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour half way
        assert findings(page) == []
    page.keyboard.press("Escape")
    page.locator("#token-open").click()
    expect(page.locator("#token")).to_be_visible()
    assert findings(page) == []


def findings(page):
    """List what axe finds, the minor things too, with where."""
    found = axe_playwright.Axe().run(page).response["violations"]
    return [(each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]]) for each in found]
