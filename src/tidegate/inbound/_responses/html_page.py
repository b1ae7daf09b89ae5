"""The HTML page that a browser gets when its request is denied: a template, a function, or a default page."""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING, Final

from tidegate._runtime.suggestions import closest
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.errors import ConfigError
from tidegate.headers._writer import find_tightest
from tidegate.inbound._responses.next_permit import shown_reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core._decision import Decision
    from tidegate.inbound._client.request import Request

    HtmlOf = Callable[[Request, Decision], str | bytes]

PLACEHOLDERS: Final = ("message", "retry_after", "limit", "reset")
EXPECTED: Final = "must be True, a template or a function of request and decision"
DEFAULT_PAGE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Too many requests</title></head>
<body style="font-family: system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem">
<h1>Too many requests</h1>
<p>$message</p>
</body>
</html>
"""


def check_html(html: object) -> str | None:
    """Return what is wrong with the option `html`; None if it is valid."""
    if html is None or isinstance(html, bool) or callable(html):
        return None
    if not isinstance(html, str) or not html.strip():
        return EXPECTED
    template = Template(html)
    if not template.is_valid():
        return f"{EXPECTED}; in a template, write $$ for a dollar sign"
    unknown = [name for name in template.get_identifiers() if name not in PLACEHOLDERS]
    if not unknown:
        return None
    near, listed = closest(unknown[0], PLACEHOLDERS), ", ".join(f"${name}" for name in PLACEHOLDERS)
    advice = f"did you mean ${near}?" if near else f"expected one of {listed}"
    return f"unknown placeholder ${unknown[0]} in the template: {advice}"


def read_html(html: object) -> HtmlOf | None:
    """Return the function that writes the page; None if there is no page."""
    problem = check_html(html)
    if problem:
        raise ConfigError(f"{problem}, not {html!r}" if problem == EXPECTED else problem, field="html")
    if html is None or html is False:
        return None
    if callable(html):
        return html
    template = Template(DEFAULT_PAGE if html is True else str(html))
    return lambda _, decision: fill(template, decision)


def fill(template: Template, decision: Decision) -> str:
    """Fill a template with the numbers of a decision; none of them comes from the client."""
    limit, (_, retry, reset) = find_tightest(decision.policy_limits, decision.views)
    seconds = "never" if retry < 0 else str(max(1, ceil_div(retry, SECOND)))
    when = "." if retry < 0 else f". Try again in {seconds} second{'s' if seconds != '1' else ''}."
    return template.substitute(
        message=f"You have sent too many requests{when}",
        retry_after=seconds,
        limit=limit.quota,
        reset=ceil_div(decision.at + shown_reset(decision.views, reset), SECOND),
    )
