"""Policies, requests and responses that the tests of the HTTP interface share."""

import asyncio
import json

POLICIES = {"api": "2/1m fixed_window", "many": "1000/1m, 5000/1h", "tokens": "100/1m fixed_window unit=tokens",
            "slots": "1/1m concurrency", "shadow": {"limits": "2/1m", "mode": "shadow"}}  # fmt: skip
K = {"policy": "api", "key": "k"}


def problem(response):
    assert response.headers["content-type"] == "application/problem+json"
    result = response.json()
    assert result["status"] == response.status_code
    return result["type"].removeprefix("urn:tidegate:problem:"), result.get("pointer")


async def raw(app, messages, headers=(), path="/v1/acquire"):
    """Send ASGI messages by hand; return the response."""
    sent = []

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


def piece(body, *, more):
    return {"type": "http.request", "body": body, "more_body": more}
