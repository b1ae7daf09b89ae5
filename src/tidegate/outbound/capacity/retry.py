"""Whether a refused request is sent again. Pure; randomness is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core.bounds import SECOND
from tidegate.outbound.capacity.learning import SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS

if TYPE_CHECKING:
    from tidegate.outbound.providers.provider import Retries

IDEMPOTENT_METHODS: Final = (
    "GET",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "TRACE",
)  # may be sent twice without doing things twice
FIRST_PAUSE: Final = 250_000  # microseconds that the first pause is on average; it doubles
MAX_PAUSE: Final = 30 * SECOND


def again(
    retries: Retries, attempt: int, status: int, method: str, spent: int, retry_after: float | None, chance: float
) -> int | None:
    """Tell after how many microseconds beyond Retry-After to send again; None: not at all.

    `spent` microseconds have passed since the first attempt, `chance` is a random number below 1. A 429 was not worked
    on, so every method is sent again; after a 503 one cannot know, so only those that may be sent twice.
    """
    if attempt > retries.most or not (
        status == TOO_MANY_REQUESTS or (status == SERVICE_UNAVAILABLE and method.upper() in IDEMPOTENT_METHODS)
    ):
        return None
    pause = round(chance * 2 * min(MAX_PAUSE, FIRST_PAUSE << (attempt - 1)))
    wait = 0 if retry_after is None else round(retry_after * SECOND)
    return pause if spent + wait + pause <= retries.within * SECOND else None
