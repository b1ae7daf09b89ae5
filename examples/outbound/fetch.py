# ruff: noqa: INP001 - an example, not a package
"""Fetch a few quotes within a provider's quota: python fetch.py local http://127.0.0.1:8103/quote AAPL MSFT."""

import sys

import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport


def main(folder: str, url: str, *symbols: str) -> None:
    """Fetch each symbol with the quotas of the files in a folder, and print the status."""
    transport = RateLimitTransport(Providers.load(directories=[folder]), store="sqlite:///quota.db")
    with httpx.Client(transport=transport) as client:
        for symbol in symbols:
            response = client.get(f"{url}/{symbol}")
            outcome = response.extensions["tidegate"]
            line = f"{symbol} {response.status_code} waited {outcome.waited:.1f} s for {outcome.provider}\n"
            print(line, end="")  # noqa: T201 - its purpose; in one piece, as threads print at the same time


if __name__ == "__main__":
    main(*sys.argv[1:])
