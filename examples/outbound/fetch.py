# ruff: noqa: INP001 - an example, not a package
"""Fetch a few quotes within a provider's quota: python fetch.py providers AAPL MSFT."""

import sys

import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport


def main(folder: str, *symbols: str) -> None:
    """Print the status of each."""
    transport = RateLimitTransport(Providers.load(directories=[folder]), store="sqlite:///quota.db")
    with httpx.Client(transport=transport) as client:
        for symbol in symbols:
            answer = client.get(f"https://financialmodelingprep.com/api/v3/quote/{symbol}")
            passage = answer.extensions["tidegate"]
            print(symbol, answer.status_code, f"waited {passage.waited:.1f} s for {passage.provider}")  # noqa: T201 - what it is for


if __name__ == "__main__":
    main(*sys.argv[1:])
