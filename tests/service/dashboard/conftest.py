"""One browser per test module, and pages that report errors and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.service.dashboard.running_service import browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

# Records layout shifts that no user input caused; browsers call their sum CLS.
SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const { value, sources, hadRecentInput } of list.getEntries()) {
    const moved = sources.map(({ node }) => String(node?.outerHTML ?? node?.nodeValue).slice(0, 90));
    if (!hadRecentInput) window.shifts.push([value, moved]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""


@pytest.fixture(scope="module")  # not longer: while Playwright runs, this thread can run no other event loop
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


class PageOpener:
    """Opens pages, and collects their errors and warnings."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def __call__(self, url: str, **options: Any) -> Page:
        context = self._chromium.new_context(**{"viewport": {"width": 1300, "height": 900}, **options})
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.add_init_script(SHIFTS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("requestfailed", self._on_failed_request)
        page.goto(url)
        return page

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _on_failed_request(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # requests that a reload aborted
            self.problems.append(f"{request.url}: {request.failure}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages. At the end, checks that they reported no problems."""
    opener = PageOpener(chromium)
    yield opener
    problems = list(opener.problems)  # before closing: it aborts active requests
    opener.close()
    assert problems == []
