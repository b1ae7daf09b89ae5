"""One browser per test module, and a fixture that opens pages and fails on errors in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.service.dashboard.dashboard_service import browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

# Records layout shifts without user input: their sum is the cumulative layout shift (CLS).
RECORD_LAYOUT_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const { value, sources, hadRecentInput } of list.getEntries()) {
    const nodes = sources.map(({ node }) => String(node?.outerHTML ?? node?.nodeValue).slice(0, 90));
    if (!hadRecentInput) window.shifts.push([value, nodes]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""


@pytest.fixture(scope="module")  # not session: while Playwright runs, this thread cannot run another event loop
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class PageOpener:
    """Opens pages, and collects their errors and warnings."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._contexts: list[Any] = []
        self.errors: list[str] = []

    def __call__(self, url: str, **options: Any) -> Page:
        context = self._chromium.new_context(**{"viewport": {"width": 1300, "height": 900}, **options})
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.add_init_script(RECORD_LAYOUT_SHIFTS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("requestfailed", self._on_request_failed)
        page.goto(url)
        return page

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_request_failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a request that a reload of the page aborted
            self.errors.append(f"{request.url}: {request.failure}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages; the test fails if one of them reports an error."""
    opener = PageOpener(chromium)
    yield opener
    errors = list(opener.errors)  # before closing, which aborts requests
    opener.close()
    assert errors == []
