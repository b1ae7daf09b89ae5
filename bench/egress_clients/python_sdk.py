"""The Python SDKs of OpenAI and Anthropic: python python_sdk.py openai|anthropic URL TOKEN CONNECTIONS SECONDS."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

MESSAGES = [{"role": "user", "content": "Hello"}]


def make_call(kind: str, url: str, token: str) -> Any:  # noqa: ANN401 - the SDKs are not installed where this is checked
    """Return a function that sends one call."""
    if kind == "openai":
        import openai  # noqa: PLC0415 - of another environment

        client = openai.AsyncOpenAI(base_url=f"{url}/openai/v1", api_key=token)
        return lambda: client.chat.completions.create(model="gpt-4o-mini", max_tokens=100, messages=MESSAGES)
    import anthropic  # noqa: PLC0415 - as above

    other = anthropic.AsyncAnthropic(base_url=f"{url}/anthropic", api_key=token)
    return lambda: other.messages.create(model="claude-haiku-4-5", max_tokens=100, messages=MESSAGES)


async def run(kind: str, url: str, token: str, connections: int, seconds: float) -> Counter[str]:
    """Send for so long, and finish the last calls."""
    end, seen = time.monotonic() + seconds, Counter[str]()
    call = make_call(kind, url, token)

    async def worker() -> None:
        while time.monotonic() < end:
            try:
                await call()
                found = "200"
            except Exception as error:  # noqa: BLE001 - whatever an SDK raises is reported
                found = str(getattr(error, "status_code", type(error).__name__))
                await asyncio.sleep(0.3)
            seen[found] += 1

    await asyncio.gather(*(worker() for _ in range(connections)))
    return seen


if __name__ == "__main__":
    kind, url, token, connections, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(run(kind, url, token, int(connections), float(seconds)))))
