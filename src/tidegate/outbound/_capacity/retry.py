"""Whether a request that was refused, or got no response, is sent again. Pure; randomness is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.outbound._providers.provider import Retries

IDEMPOTENT_METHODS: Final = (
    "GET",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "TRACE",
)  # sent twice, they have the same effect as sent once
FIRST_PAUSE: Final = 250_000  # microseconds, the average of the first pause; it doubles
MAX_PAUSE: Final = 30 * SECOND


def retry_pause(retries: Retries, attempt: int, spent: int, retry_after: float | None, jitter: float) -> int | None:
    """Return how many microseconds after Retry-After to retry; None: do not retry.

    `spent` microseconds have passed since the first attempt, `jitter` is a random number below 1.
    """
    if attempt > retries.max_retries:
        return None
    pause = round(jitter * 2 * min(MAX_PAUSE, FIRST_PAUSE << (attempt - 1)))
    wait = 0 if retry_after is None else round(retry_after * SECOND)
    return pause if spent + wait + pause <= retries.within * SECOND else None
