# ruff: noqa: INP001, T201 - an example that prints, not a package
"""Ask a model several questions within its quota: python chat.py http://127.0.0.1:8102."""

import sys

import httpx

from tidegate import Denied
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport

TOPICS = ("tides", "gates", "rivers", "ships", "locks", "canals")


def main(url: str) -> None:
    """Ask each question, and print what it cost."""
    transport = RateLimitTransport(Providers.load(directories=["providers"]), store="sqlite:///quota.db", timeout=0)
    with httpx.Client(transport=transport, base_url=url) as client:
        for topic in TOPICS:
            body = {"model": "small", "max_tokens": 100, "messages": [{"role": "user", "content": topic}]}
            try:
                response = client.post("/v1/chat/completions", json=body)
            except Denied as denied:
                print(f"{topic}: denied, the quota has room again in {denied.decision.retry_after or 0:.0f} s")
                return
            print(f"{topic}: {response.json()['usage']['total_tokens']} tokens")


if __name__ == "__main__":
    main(sys.argv[1])
