"""Policies, requests and responses that the tests of the HTTP interface share."""

import asyncio
from contextlib import suppress

POLICIES = {"api": "2/1m fixed_window", "many": "1000/1m, 5000/1h", "tokens": "100/1m fixed_window unit=tokens",
            "slots": "1/1m concurrency", "shadow": {"limits": "2/1m", "mode": "shadow"}}  # fmt: skip
K = {"policy": "api", "key": "k"}


def problem(response):
    assert response.headers["content-type"] == "application/problem+json"
    result = response.json()
    assert result["status"] == response.status_code
    return result["type"].removeprefix("urn:tidegate:problem:"), result.get("pointer")


async def disconnect(service, calling):
    """Wait until a call waits for a permit; then its client disconnects."""
    while not service.decider.waiting:
        await asyncio.sleep(0)
    calling.cancel()
    with suppress(asyncio.CancelledError):
        await calling
    while service.decider.waiting or service.app.in_flight:
        await asyncio.sleep(0)
