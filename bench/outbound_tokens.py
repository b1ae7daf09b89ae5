"""Measure what a call to a language model costs more: a 2 KB request, limits of requests and of tokens, in one thread.

python -m bench.outbound_tokens            about a minute
python -m bench.outbound_tokens --quick    a look

The response comes from memory: a mock of the network that answers at once, so that nothing but the client and the
limiter is measured. The contenders take turns in short slices. Shown is the processor time of a call: how much more it
is than the plain client's of the same slice (the median over slices), and the same for the best slice of each, which
other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import httpx
import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    Post = Callable[[], Any]

SLICE: Final = 100  # calls
URL: Final = "https://api.test/v1/chat/completions"
MESSAGES: Final = [{"role": "user", "content": "What is the price of a litre of milk? " * 50}]
BODY: Final = json.dumps({"model": "m", "max_tokens": 100, "messages": MESSAGES}).encode()
USAGE: Final = {"prompt_tokens": 500, "completion_tokens": 50, "total_tokens": 550}
REPLY: Final = json.dumps({"choices": [{"message": {"content": "It depends. " * 20}}], "usage": USAGE}).encode()
HEADERS: Final = {"content-type": "application/json"}


def providers() -> Providers:
    """Allow plenty of requests and tokens."""
    limits = ["100_000/1s", "100_000_000/1s unit=tokens name=tokens"]
    return Providers.of({"domain": "api.test", "limits": limits, "profile": "openai"})


class MemoryNetwork(HTTPAdapter):
    """The network of requests, answering at once."""

    def send(self, request: requests.PreparedRequest, *_arguments: object, **_options: object) -> requests.Response:
        """Answer."""
        raw = HTTPResponse(io.BytesIO(REPLY), HEADERS, 200, preload_content=False)
        return self.build_response(request, raw)


class LimitedNetwork(RateLimitAdapter, MemoryNetwork):
    """The same behind tidegate."""


def with_httpx(stack: ExitStack, store: str | None) -> Post:
    """Open a client of httpx."""
    mock: httpx.BaseTransport = httpx.MockTransport(
        lambda _request: httpx.Response(200, headers=HEADERS, stream=Body())
    )
    if store is not None:
        mock = RateLimitTransport(providers(), store, mock)
    client = stack.enter_context(httpx.Client(transport=mock))
    return lambda: client.post(URL, content=BODY, headers=HEADERS)


class Body(httpx.SyncByteStream):
    """The body of a response in one piece."""

    def __iter__(self) -> Any:  # noqa: ANN401 - an iterator of bytes
        """Yield it."""
        yield REPLY


def with_requests(stack: ExitStack, store: str | None) -> Post:
    """Open a session of requests."""
    session = stack.enter_context(requests.Session())
    session.mount("https://", MemoryNetwork() if store is None else LimitedNetwork(providers(), store))
    return lambda: session.post(URL, data=BODY, headers=HEADERS)


CONTENDERS: Final = (
    ("httpx", "httpx", with_httpx, None),
    ("httpx + tidegate, memory", "httpx", with_httpx, "memory://"),
    ("httpx + tidegate, sqlite", "httpx", with_httpx, "sqlite:///{}/quota.db"),
    ("requests", "requests", with_requests, None),
    ("requests + tidegate, memory", "requests", with_requests, "memory://"),
)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer slices")
    rounds = 15 if options.parse_args().quick else 80
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opened = {name: make(stack, store and store.format(folder)) for name, _, make, store in CONTENDERS}
        times: dict[str, list[float]] = {name: [] for name in opened}
        for number in range(rounds + 1):
            for name, post in opened.items():
                begun = time.process_time()
                for _ in range(SLICE):
                    post()
                if number:
                    times[name].append((time.process_time() - begun) / SLICE * 1e6)
    print(f"{'':34} {'µs per call':>12} {'added':>8} {'best':>8} {'added':>8}")
    for name, plain, _, _ in CONTENDERS:
        added = median(a - b for a, b in zip(times[name], times[plain], strict=True))
        best = min(times[name])
        print(f"{name:34} {median(times[name]):12.0f} {added:8.0f} {best:8.0f} {best - min(times[plain]):8.0f}")


if __name__ == "__main__":
    main()
