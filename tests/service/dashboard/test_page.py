"""The dashboard in a real browser, with real processes: its panels, its actions, its layout and its accessibility."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.servers.valkey import ValkeyServer
from tests.service.dashboard.dashboard_service import POLICIES, basic_service, full_service, prefix_proxy
from tests.service.harness import ADMIN, DECISION
from tidegate.spending._report import short_money

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")

TIMEOUT = 20_000  # milliseconds, for a busy machine
PHONE = {"width": 360, "height": 740}
TRUNCATED_CELLS = """
(panel) => [...document.querySelectorAll(`${panel} td, ${panel} .bar-label`)]
  .filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.textContent)
"""
FORMAT_AMOUNTS = "async ([module, amounts]) => amounts.map((await import(module)).formatMoney)"
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
    expect(page.locator("#connection-text")).to_have_text("live", timeout=TIMEOUT)


def wait_for_responses(page, count):
    """Wait for further responses of /v1/overview."""
    for _ in range(count):
        with page.expect_response("**/v1/overview*", timeout=TIMEOUT):
            pass


def row(page, table, text):
    return page.locator(f"#{table} tbody tr").filter(has_text=text)


def look_up(page, key):
    page.locator("#search-key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#key-page")).to_be_visible()
    expect(page.locator("#key-verdict")).not_to_be_empty(timeout=TIMEOUT)


def confirm(page, button, **fields):
    """Click a button that asks, fill in the dialog, and confirm."""
    button.click()
    expect(page.locator("#confirm")).to_be_visible()
    for name, value in fields.items():
        page.locator(f"#confirm-{name}").fill(value)
    page.locator("#confirm-yes").click()


# ---- panels ----------------------------------------------------------------------------------------------------------


def test_decisions_are_shown_without_layout_shifts(basic, open_page):
    assert basic.acquire("login", "203.0.113.1", 7) == [True] * 5 + [False] * 2
    page = open_page(basic.url)
    wait_until_live(page)
    basic.acquire("api", "user:1", 20)
    expect(row(page, "denials", "203.0.113.1").first).to_contain_text("over 5 per minute", timeout=TIMEOUT)
    expect(row(page, "near", "203.0.113.1")).to_contain_text("5 per minute")
    expect(row(page, "near", "203.0.113.1")).to_contain_text("100 %")
    expect(row(page, "top", "203.0.113.1")).to_contain_text("over 5 per minute")
    expect(row(page, "policies", "login")).to_contain_text(re.compile(r"\(\d+ %\)"))
    expect(page.locator("#now-median")).to_have_text(re.compile(r"µs|ms|s"), timeout=TIMEOUT)
    expect(page.locator("#chart-decisions path.fill.s-denied")).to_have_attribute("d", re.compile("^M"))
    expect(row(page, "state", "Store").first).to_contain_text("available")
    wait_for_responses(page, 2)
    page.evaluate("window.shifts = []")
    wait_for_responses(page, 3)
    assert page.evaluate("window.shifts") == []


def test_choosing_a_policy_filters_the_whole_page_and_is_in_the_url(basic, open_page):
    basic.acquire("login", "198.51.100.1", 6)
    basic.acquire("search", "other-key", 40)
    page = open_page(basic.url)
    wait_until_live(page)
    expect(row(page, "top", "198.51.100.1")).to_be_visible()
    page.locator("#policies").get_by_role("button", name="search").click()
    expect(page.locator("#note-decisions")).to_have_text("search")
    expect(page.locator("#policy")).to_have_value("search")
    expect(row(page, "top", "198.51.100.1")).to_have_count(0)
    expect(row(page, "denials", "198.51.100.1")).to_have_count(0)
    page.locator("#range").select_option("1h")
    assert page.url.endswith("?range=1h&policy=search")
    shared = open_page(page.url)
    wait_until_live(shared)
    expect(shared.locator("#note-decisions")).to_have_text("search")
    expect(shared.locator("#range")).to_have_value("1h")
    expect(shared.locator("#chart-decisions path.stroke.s-admitted")).to_have_count(1)
    page.go_back()
    expect(page.locator("#range")).to_have_value("5m")
    page.go_back()
    expect(page.locator("#note-decisions")).to_have_text("all policies")


def test_a_range_is_zoomed_by_dragging_and_all_charts_have_one_cursor(basic, open_page):
    page = open_page(basic.url)
    wait_until_live(page)
    basic.acquire("api", "user:1", 5)
    wait_for_responses(page, 2)
    box = page.locator("#chart-decisions .plot").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    for chart in ("decisions", "latency"):
        expect(page.locator(f"#chart-{chart} .tooltip")).to_be_visible()
        expect(page.locator(f"#chart-{chart} .cursor")).to_be_visible()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, middle)
    expect(page.locator("#chart-latency .selection")).to_be_visible()
    page.mouse.up()
    expect(page.locator("#zoom-out")).to_be_visible()
    expect(page.locator("#filter-note")).to_have_text(re.compile(r"^\w+ \d+, \d\d:\d\d:\d\d to \d\d:\d\d:\d\d$"))
    assert re.search(r"\?from=\d+&to=\d+$", page.url)
    page.locator("#zoom-out").click()
    expect(page.locator("#zoom-out")).to_be_hidden()
    page.locator("#chart-decisions .plot").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#chart-latency .tooltip")).to_be_visible()
    page.keyboard.press("Enter")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowLeft")
    expect(page.locator("#chart-latency .selection")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#zoom-out")).to_be_visible()
    start, end = map(int, re.search(r"\?from=(\d+)&to=(\d+)$", page.url).groups())
    assert 25_000 <= end - start <= 35_000


def test_the_status_line_names_the_key_and_offers_to_block_it(tmp_path, open_page):
    with basic_service(tmp_path, "policies: {login: 5/1m}\n") as service:
        page = open_page(service.url)
        expect(page.locator("#findings")).to_contain_text("No calls in the last minute", timeout=TIMEOUT)
        expect(page.locator("#panel-hints")).to_be_visible()
        service.acquire("login", "203.0.113.77", 40)
        finding = page.locator(".finding").first
        expect(finding).to_contain_text("all calls denied", timeout=TIMEOUT)
        expect(finding).to_contain_text("login, 203.0.113.77 (100 %)")
        expect(finding).to_contain_text("over 5 per minute")
        expect(finding).to_have_attribute("data-level", "bad")
        assert "denied" in page.title()
        expect(page.locator("#panel-hints")).to_be_hidden()
        confirm(page, finding.get_by_role("button", name="Block"), reason="a test", actor="Ada")
        expect(page.locator("#confirm")).to_be_hidden()
        expect(row(page, "near", "203.0.113.77")).to_contain_text("blocked by Ada: a test", timeout=TIMEOUT)
        expect(row(page, "audit", "203.0.113.77")).to_contain_text("Ada", timeout=TIMEOUT)
        assert service.acquire("login", "203.0.113.77") == [False]
        confirm(page, finding.get_by_role("button", name="Unblock"), reason="a test is over")
        expect(finding.get_by_role("button", name="Block")).to_have_text("Block…", timeout=TIMEOUT)
        expect(row(page, "near", "203.0.113.77")).not_to_contain_text("blocked", timeout=TIMEOUT)


def test_the_list_of_denied_keys_is_grouped_filtered_and_paused(basic, open_page):
    for key, times in (
        ("tenant-of-a-customer-with-a-long-name-eu-7", 9),
        ("tenant-of-a-customer-with-a-long-name-eu-8", 7),
    ):
        basic.acquire("login", key, times)
    page = open_page(basic.url)
    wait_until_live(page)
    rows = row(page, "top", "tenant-of")
    expect(rows).to_have_count(2)
    assert rows.nth(0).locator(".name-tail").text_content().endswith("eu-7")
    page.locator("#top-filter").fill("EU-8")
    expect(page.locator("#top tbody tr")).to_have_count(1)
    page.locator("#top-filter").fill("no such key")
    expect(page.locator("#top-empty")).to_be_visible()
    page.locator("#top-filter").fill("")
    page.locator("#top-group").select_option("policy")
    expect(row(page, "top", "login")).to_contain_text("listed")
    page.locator("#top-group").select_option("both")
    page.locator("#top-pause").click()
    before = page.locator("#top tbody").inner_text()
    basic.acquire("login", "late-key", 30)
    wait_for_responses(page, 3)
    assert page.locator("#top tbody").inner_text() == before
    page.locator("#top-pause").click()
    expect(row(page, "top", "late-key")).to_be_visible()


def test_a_lost_store_is_a_banner_and_a_band_in_the_charts(tmp_path, open_page):
    with ValkeyServer() as valkey:
        policies = f"store: {valkey.url}\npolicies: {{login: 5/1m, open: {{limits: 5/1m, on_store_error: allow}}}}\n"
        with basic_service(tmp_path, policies) as service:
            service.acquire("login", "a", 2)
            page = open_page(service.url)
            wait_until_live(page)
            valkey.kill()
            service.http.post("/v1/acquire", json={"policy": "login", "key": "a"})
            finding = page.locator('.finding[data-kind="store"]')
            expect(finding).to_contain_text("Store unavailable since", timeout=TIMEOUT)
            expect(finding).to_contain_text("every call, without limits")
            expect(page.locator("#chart-decisions .band-label")).to_be_visible(timeout=TIMEOUT)
            expect(page.locator("#chart-latency .band")).to_have_count(1)
            assert accessibility_violations(page) == []
            expect(row(page, "policies", "login")).to_contain_text("1 (33 %)")
            look_up(page, "another-key")
            expect(page.locator("#key-verdict")).to_contain_text("the usage of this key is unknown")
            valkey.start()
            expect(finding).to_have_count(0, timeout=60_000)


def test_a_refused_file_is_reported_until_it_is_corrected(tmp_path, open_page):
    text = "reload_every: 100ms\npolicies: {login: 5/1m}\n"
    with basic_service(tmp_path, text) as service:
        page = open_page(service.url)
        wait_until_live(page)
        file = tmp_path / "service.yaml"
        file.write_text(text.replace("5/1m", "five"), encoding="utf-8")
        finding = page.locator('.finding[data-kind="file"]')
        expect(finding).to_contain_text("Configuration file refused since", timeout=TIMEOUT)
        expect(finding).to_contain_text("service.yaml")
        file.write_text(text.replace("5/1m", "6/1m"), encoding="utf-8")
        expect(finding).to_have_count(0, timeout=TIMEOUT)
        mark = page.locator('#chart-decisions .marker[data-kind="rules"]')
        expect(mark).to_have_attribute("title", re.compile("login: 5/1m . 6/1m"), timeout=TIMEOUT)


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
    marker = page.locator(".resource", has_text="openai").locator(".markers .reduction").first
    expect(marker).to_have_attribute("title", re.compile("to 50: received 429 response"))
    expect(row(page, "state", "Bus")).to_contain_text("connected")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert accessibility_violations(page) == []
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 900})
        wait_for_responses(page, 1)
        assert cut_off_headings(page) == []
    page.set_viewport_size(PHONE)
    assert overflowing_elements(page) == []


def cut_off_headings(page):
    """Return the headings of columns that are wider than their column."""
    return page.evaluate("""[...document.querySelectorAll("thead th")]
        .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)""")


def test_money_of_pools_is_shown_with_its_currency_and_not_as_zero(tmp_path, open_page):
    price = "{date: 2026-11-01, models: {m: {input: 10, output: 50}}}"
    file = tmp_path / "models.yaml"
    file.write_text(
        f"domain: api.test\nname: models\nprofile: openai\nprice: {price}\n"
        "limits: [500/1m, 5/day unit=usd]\npool: {members: [{name: first}]}\n"
    )
    file.chmod(0o600)
    with basic_service(tmp_path, f"{POLICIES}\nproviders: {file}\ndata: {tmp_path}/data\n") as service:
        cost = {"requests": 1, "usd_micros": 2712}
        assert service.http.post("/v1/acquire", json={"provider": "models", "cost": cost}).json()["allowed"]
        for width, height in ((1440, 900), (390, 844)):
            page = open_page(service.url, viewport={"width": width, "height": height})
            expect(row(page, "panel-pools", "0.0027 of 5.00 usd")).to_have_count(1, timeout=TIMEOUT)
            expect(row(page, "panel-pools", "first").locator("td").last).to_have_text("0.00 usd")
            assert page.evaluate(TRUNCATED_CELLS, "#panel-pools") == []
        amounts = [0, 3, 27, 271, 2712, 9949, 9999, 14_999, 155_000, 1_234_567_890, -2712]
        texts = page.evaluate(FORMAT_AMOUNTS, [f"{service.url}/dashboard/format.js", amounts])
        assert texts == [short_money(amount) for amount in amounts]


def test_an_unreachable_service_is_reported(basic, chromium):
    page = chromium.new_page()  # without open_page: the browser logs an error for each lost connection
    try:
        page.goto(basic.url)
        wait_until_live(page)
        page.route("**/v1/overview*", lambda route: route.abort())
        expect(page.locator("#notice")).to_contain_text("does not respond", timeout=TIMEOUT)
        expect(page.locator("#connection-text")).to_have_text("no response")
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
    look_up(page, "203.0.113.2")
    assert page.url.endswith("?key=203.0.113.2")
    expect(page.locator("#key-title")).to_have_text("203.0.113.2")
    verdict, first = page.locator("#key-verdict"), row(page, "key-limits", "5 per minute")
    expect(first).to_contain_text("5 of 5")
    expect(row(page, "key-limits", "20 per hour")).to_contain_text("5 of 20")
    expect(verdict).to_have_text("Its next call is denied by login (over 5 per minute).")
    confirm(page, first.get_by_role("button", name="reset in login"))
    expect(verdict).to_contain_text("Never seen", timeout=TIMEOUT)
    basic.acquire("login", "203.0.113.2")
    expect(first).to_contain_text("1 of 5", timeout=TIMEOUT)
    confirm(page, first.get_by_role("button", name="block in login"), reason="guesses passwords", actor="Ada")
    expect(verdict).to_contain_text(
        re.compile("Blocked in login for another (10 min|9 min).* by Ada: guesses passwords"), timeout=TIMEOUT
    )
    expect(first).to_contain_text("denied: blocked")
    assert basic.acquire("login", "203.0.113.2") == [False]
    confirm(page, first.get_by_role("button", name="unblock in login"))
    expect(verdict).to_have_text("Its next call is admitted by every policy.", timeout=TIMEOUT)
    assert basic.acquire("login", "203.0.113.2") == [True]
    expect(page.locator("#key-audit li")).to_have_count(3, timeout=TIMEOUT)
    page.locator("#key-close").click()
    expect(page.locator("#key-page")).to_be_hidden()


def test_an_unknown_key_was_never_seen(basic, open_page):
    page = open_page(f"{basic.url}/?key=nobody-knows-it")
    expect(page.locator("#key-verdict")).to_contain_text("Never seen", timeout=TIMEOUT)
    expect(page.locator("#key-history")).to_be_hidden()


def test_the_page_of_a_key_opens_below_the_header_with_all_its_buttons(basic, open_page):
    basic.acquire("login", "203.0.113.5", 6)
    basic.http.post("/v1/block", json={"policy": "login", "key": "203.0.113.5", "seconds": 60})
    page = open_page(basic.url, viewport={"width": 1300, "height": 500})
    wait_until_live(page)
    page.locator("footer").scroll_into_view_if_needed()
    row(page, "denials", "203.0.113.5").get_by_role("button").first.click()
    unblock = page.locator("#key-limits").get_by_role("button", name="unblock in login")
    expect(unblock).to_be_visible(timeout=TIMEOUT)
    header, title = page.locator("header").bounding_box(), page.locator("#key-title").bounding_box()
    assert title["y"] >= header["y"] + header["height"]
    cell = page.locator("#key-limits td.c-actions").first.bounding_box()
    reset = page.locator("#key-limits").get_by_role("button", name="reset in login").bounding_box()
    assert reset["x"] >= cell["x"]
    page.evaluate("scrollTo(0, 0)")
    page.locator("#range").select_option("1h")  # the page stays where it is
    wait_for_responses(page, 1)
    assert page.evaluate("scrollY") == 0
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 900})
        wait_for_responses(page, 1)
        assert cut_off_headings(page) == []
    basic.http.post("/v1/unblock", json={"policy": "login", "key": "203.0.113.5"})


def test_an_unknown_policy_in_the_url_is_reported(basic, open_page):
    page = open_page(f"{basic.url}/?policy=removed")
    expect(page.locator("#filter-note")).to_have_text("There is no policy removed.", timeout=TIMEOUT)


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_key_is_copied_with_and_without_the_clipboard_api(basic, open_page, has_clipboard):
    basic.acquire("login", "203.0.113.6", 6)
    page = open_page("about:blank", permissions=["clipboard-read", "clipboard-write"])
    if not has_clipboard:  # as without HTTPS
        page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined })")
    page.goto(basic.url)
    wait_until_live(page)
    copy = row(page, "top", "203.0.113.6").get_by_role("button", name="Copy")
    copy.click()
    copy.click()
    expect(copy).to_have_text("Copied")
    expect(copy).to_have_text("Copy", timeout=TIMEOUT)
    page.locator("#search-key").focus()
    page.keyboard.press("Control+V")
    expect(page.locator("#search-key")).to_have_value("203.0.113.6")


def test_only_keys_that_have_used_half_of_a_limit_are_near_it(basic, open_page):
    page = open_page(basic.url)
    wait_until_live(page)
    basic.acquire("login", "near-its-limit", 3)
    basic.acquire("login", "far-from-its-limit", 2)
    expect(row(page, "near", "near-its-limit")).to_be_visible(timeout=TIMEOUT)
    expect(row(page, "near", "far-from-its-limit")).to_have_count(0)


def test_a_click_on_a_denied_key_opens_its_page(basic, open_page):
    parts = ["tenant", "a/b"]
    body = {"policy": "login", "key": parts, "cost": 6}
    assert basic.http.post("/v1/acquire", json=body).json()["allowed"] is False
    page = open_page(basic.url)
    wait_until_live(page)
    shown = "tenant \u203a a/b"
    row(page, "denials", shown).get_by_role("button").first.click()
    expect(page.locator("#key-title")).to_have_text(shown)
    expect(row(page, "key-limits", "5 per minute")).to_contain_text("0 of 5")
    assert page.url.endswith("?key=tenant&key=a%2Fb")
    page.locator("#key-close").click()
    look_up(page, '["tenant", "a/b"]')
    expect(page.locator("#key-title")).to_have_text(shown)


def test_keys_and_policies_are_never_interpreted_as_markup(tmp_path, open_page):
    policies = f"policies: {{'{HOSTILE}': 1/1h}}\n"
    with basic_service(tmp_path, policies) as service:
        assert service.acquire(HOSTILE, HOSTILE, 2) == [True, False]
        page = open_page(service.url)
        wait_until_live(page)
        expect(row(page, "denials", HOSTILE).get_by_role("button")).to_have_text(HOSTILE)
        expect(row(page, "policies", HOSTILE).locator(".name")).to_have_text(HOSTILE)
        expect(page.locator("#policy option").nth(1)).to_have_text(HOSTILE)
        look_up(page, HOSTILE)
        expect(page.locator("#key-title")).to_have_text(HOSTILE)
        expect(row(page, "key-limits", "1 per hour")).to_contain_text("1 of 1")
        assert page.evaluate("window.injected") is None
        assert page.locator("main img, dialog img, main script").count() == 0


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_the_token_is_requested_stored_in_the_tab_and_sent(tmp_path, open_page):
    tokens = {"TIDEGATE_DECISION_TOKEN": DECISION, "TIDEGATE_ADMIN_TOKEN": ADMIN}
    with basic_service(tmp_path, **tokens) as service:
        page = open_page(service.url)
        expect(page.locator("#token")).to_be_visible()
        expect(page.locator("#policies tbody tr")).to_have_count(0)
        page.locator("#token-value").fill("not-the-token")
        page.keyboard.press("Enter")
        expect(page.locator("#token-message")).to_have_text("The service does not accept this token.", timeout=TIMEOUT)
        page.locator("#token-value").fill(DECISION)
        page.keyboard.press("Enter")
        wait_until_live(page)
        expect(row(page, "policies", "login")).to_be_visible()
        service.http.headers["authorization"] = f"Bearer {DECISION}"
        assert service.acquire("login", "203.0.113.3") == [True]
        look_up(page, "203.0.113.3")
        reset = row(page, "key-limits", "5 per minute").get_by_role("button", name="reset in login")
        confirm(page, reset)
        expect(page.locator("#confirm-status")).to_contain_text("this needs the admin token")
        expect(page.locator("#token")).to_be_visible()
        page.locator("#token-value").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.locator("#token")).to_be_hidden()
        page.locator("#confirm-yes").click()
        expect(page.locator("#key-verdict")).to_contain_text("Never seen", timeout=TIMEOUT)
        assert page.evaluate("Object.values(sessionStorage)") == [ADMIN]
        assert page.evaluate("Object.values(localStorage)") == []
        assert ADMIN not in page.url
        assert page.context.cookies() == []
        # The browser logs an error for the 401 and 403 responses.
        assert [error for error in open_page.errors if "401" not in error and "403" not in error] == []
        open_page.errors.clear()


def test_the_page_works_behind_a_prefix_of_a_proxy(basic, open_page):
    basic.acquire("login", "203.0.113.9", 6)
    with prefix_proxy(basic.url) as url:
        page = open_page(f"{url}?key=203.0.113.9")
        wait_until_live(page)
        expect(page.locator("#key-verdict")).to_contain_text("denied by login", timeout=TIMEOUT)
        page.locator("#range").select_option("1h")
        assert page.url == f"{url}?range=1h&key=203.0.113.9"
        confirm(page, row(page, "key-limits", "5 per minute").get_by_role("button", name="reset in login"))
        expect(page.locator("#key-verdict")).to_contain_text("Its next call is admitted", timeout=TIMEOUT)
        page.goto("about:blank")


def test_nothing_is_loaded_from_elsewhere_and_no_inline_script_runs(basic, open_page):
    page = open_page("about:blank")
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    response = page.goto(basic.url)
    wait_until_live(page)
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert all(url.startswith(basic.url) for url in requested)
    assert page.locator("script:not([src]), [style], [onclick], style").count() == page.locator("main [style]").count()


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
    expect(page.locator("#key-page")).to_be_visible()
    expect(page.locator("#key-title")).to_be_focused()  # so that a screen reader reads it, and its buttons are near
    page.keyboard.press("Escape")
    expect(page.locator("#key-page")).to_be_hidden()
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


def test_the_page_does_not_scroll_sideways_on_a_phone(tmp_path, open_page):
    with basic_service(tmp_path) as service:  # of its own: the status line must not change
        service.acquire("login", "a-key-that-is-much-longer-than-a-phone-is-wide:" + "x" * 200, 6)
        page = open_page(service.url, viewport=PHONE, has_touch=True, is_mobile=True)
        wait_until_live(page)
        expect(row(page, "denials", "a-key-that").first).to_be_visible()
        wait_for_responses(page, 2)
        assert overflowing_elements(page) == []
        assert page.evaluate("window.shifts") == []
        last_shown = page.locator("#policies thead th", has_text="Denied/s")
        assert last_shown.evaluate("(each) => parseFloat(getComputedStyle(each).paddingRight)") > 10


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
    look_up(page, "203.0.113.4")
    row(page, "key-limits", "5 per minute").get_by_role("button", name="block in login").click()
    expect(page.locator("#confirm")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour transition
        assert accessibility_violations(page) == []
    page.keyboard.press("Escape")
    assert accessibility_violations(page) == []
    page.locator("#token-open").click()
    expect(page.locator("#token")).to_be_visible()
    assert accessibility_violations(page) == []


def accessibility_violations(page):
    """Return the violations that axe finds, of any impact, with their elements."""
    found = axe_playwright.Axe().run(page).response["violations"]
    return [(each["id"], each["impact"], [node["html"][:120] for node in each["nodes"]]) for each in found]
