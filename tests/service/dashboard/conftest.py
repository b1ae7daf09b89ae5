"""One browser for the tests of a module, and pages that report whatever goes wrong in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.service.dashboard import stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

# What moved without the user having done anything, and by how much: the sum is what browsers call CLS.
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
    with stage.browser() as found:
        yield found


class Visits:
    """Opens pages, and collects what they complain of."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._contexts: list[Any] = []
        self.complaints: list[str] = []

    def __call__(self, url: str, **options: Any) -> Page:
        context = self._chromium.new_context(**{"viewport": {"width": 1300, "height": 900}, **options})
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.add_init_script(SHIFTS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", self._fail)
        page.goto(url)
        return page

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.complaints.append(said.text)

    def _fail(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # what a page was asking for when it was loaded again
            self.complaints.append(f"{request.url}: {request.failure}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open pages; at the end, none may have complained."""
    visits = Visits(chromium)
    yield visits
    complaints = list(visits.complaints)  # closing a page ends what it is asking for
    visits.close()
    assert complaints == []
