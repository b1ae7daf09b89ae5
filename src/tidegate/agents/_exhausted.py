"""What a node does when a limit per run has nothing left: deny, spend credits, or ask whether it may be extended.

`on_exhausted` is `"stop"`, credits, a function, the URL of a webhook, or a list of these: credits are tried in order,
in the step that charges the call, and then the function or the webhook is asked. It returns the amounts to extend its
node by, such as `{"usd": "0.05"}`, or None. It extends this node only: the nodes above deny what they do not have.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.waiting import CallStep
from tidegate._runtime.clock import SystemClock
from tidegate._runtime.urls import redact_text
from tidegate.agents._credits import AsyncCredits, BaseCredits, Credits
from tidegate.errors import ConfigError
from tidegate.spending._webhook import post_question

if TYPE_CHECKING:
    from tidegate.agents._limits import Amount

log: logging.Logger = logging.getLogger("tidegate.agents")

ASK_TIMEOUT: Final = 5.0


class Exhausted(NamedTuple):
    """A call that a limit per run of a node denies: what it needed, what is left, and of how much.

    `id` and `node` are the path and the names of the node; `limit` is the name of the limit.
    """

    id: str
    node: str
    limit: str
    unit: str
    quota: int
    remaining: int
    needed: int


Ask = Callable[[Exhausted], object]
OnExhausted = str | Credits | AsyncCredits | Ask | Sequence[str | Credits | AsyncCredits | Ask]


class AskWebhook:
    """Asks a webhook whether a node may be extended.

    It posts the fields of Exhausted as JSON, signed as other webhooks of tidegate are if there is a `secret`. The
    response with status 200 is JSON: `{"extend": {"usd": "0.05"}}`, or `{}`. Any other response denies the call.
    """

    def __init__(self, url: str, secret: str | None = None, *, timeout: float = ASK_TIMEOUT) -> None:
        """Post to this URL, and wait `timeout` seconds for the whole response."""
        if not url.startswith(("https://", "http://")):
            message = f"must be 'stop', credits, a function, or the URL of a webhook, not {url!r}"
            raise ConfigError(message, field="on_exhausted")
        self._url = url
        self._secret = secret.encode() if secret else None
        self._timeout = timeout
        self._clock = SystemClock()

    def __call__(self, exhausted: Exhausted) -> Mapping[str, Amount] | None:
        """Ask; returns the amounts to extend by."""
        try:
            text = post_question(self._url, exhausted._asdict(), self._secret, self._timeout, self._clock)
            answer = json.loads(text)
        except (OSError, ValueError) as error:
            log.warning("%s is not extended: its webhook gave no answer: %s", exhausted.node, redact_text(error))
            return None
        more = answer.get("extend") if isinstance(answer, dict) else None
        return more if isinstance(more, dict) else None


class ExhaustedPlan(NamedTuple):
    """What was passed as `on_exhausted`."""

    credits: tuple[BaseCredits, ...] = ()
    ask: Ask | None = None

    def step(self, exhausted: Exhausted) -> CallStep:
        """Return the step that asks."""
        ask = self.ask
        assert ask is not None  # noqa: S101 - checked by the caller
        return CallStep(lambda: ask(exhausted), blocks=isinstance(ask, AskWebhook))


STOP: Final = ExhaustedPlan()


def read_on_exhausted(value: object) -> ExhaustedPlan:
    """Read the option."""
    items: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
    found: list[BaseCredits] = []
    ask: Ask | None = None
    for item in items:
        if isinstance(item, BaseCredits) and ask is None:
            found.append(item)
        elif isinstance(item, str) and item == "stop" and ask is None:
            continue
        elif ask is None and (isinstance(item, str) or callable(item)):
            ask = AskWebhook(item) if isinstance(item, str) else item
        else:
            message = "must be 'stop', credits, and then one function or one URL of a webhook"
            raise ConfigError(f"{message}, not {item!r}", field="on_exhausted")
    return ExhaustedPlan(tuple(found), ask)
