"""A client of a pool, for tests of pools and of spending ceilings."""

import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport

URL = "https://api.test/v1/chat/completions"
KEY = {"header": "Authorization", "prefix": "Bearer"}
PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "cached": 0.1, "output": 5}}}


def pool(*members, limits=("3/1m",), spend=None, price=None, **fields):
    """The settings of a provider with a pool; members are names or mappings."""
    listed = [each if isinstance(each, dict) else {"name": each, "api_key": f"key-{each}"} for each in members]
    found = {
        "domain": "api.test",
        "name": "models",
        "profile": "openai",
        "limits": list(limits),
        "key": KEY,
        "pool": {"members": listed, **fields},
    }
    if price is not None:
        found["price"] = price
    if spend is not None:
        found["spend"] = spend
    return found


class Client(httpx.Client):
    """A client of a pool; notes which key and host sent each request."""

    def __init__(self, store, settings, answer=None, jitter=lambda: 0.5, **options):
        self.sent, self.hosts = [], []
        usage = {"prompt_tokens": 100, "completion_tokens": 30}

        def handle(request):
            key = request.headers["authorization"].removeprefix("Bearer key-")
            self.sent.append(key)
            self.hosts.append(str(request.url))
            found = None if answer is None else answer(key)
            return found or httpx.Response(200, json={"usage": usage})

        known = settings if isinstance(settings, Providers) else Providers.of(settings)
        options = {"timeout": 0, "tokenizer": lambda _text: 100, "jitter": jitter, **options}
        transport = RateLimitTransport(known, store, httpx.MockTransport(handle), **options)
        self.gate = transport.gate
        super().__init__(transport=transport)

    def ask(self, **headers):
        body = {"model": "m", "max_tokens": 200}
        return self.post(URL, json=body, headers={"authorization": "Bearer of-the-sdk", **headers})

    def used(self):
        return {a.provider.member: next(iter(a.limiter.usage(a.key).values())).used for a in self.gate.accounts}
