"""A sample response of each entry of tidegate.headers._servers, and what it means at NOW."""

from __future__ import annotations

from typing import NamedTuple

from tidegate.headers import LimitAdvice

NOW = 1_700_000_000.0  # 2023-11-14T22:13:20Z


class Sample(NamedTuple):
    """The rate limit headers of a response, the limits that they announce, and the wait that they ask for."""

    headers: dict[str, str]
    limits: tuple[LimitAdvice, ...] = ()
    retry_after: float | None = None


SAMPLES: dict[str, Sample] = {
    "azure": Sample(
        {
            "x-ms-ratelimit-remaining-subscription-reads": "11999",
            "x-ms-ratelimit-remaining-resource": (
                "Microsoft.Compute/HighCostGet3Min;107,Microsoft.Compute/HighCostGet30Min;793"
            ),
            "Retry-After": "17",
            "x-ms-request-id": "2f6c1f6e-1f3c-4f0b-9d3a-52c1e51a6a3f",
        },
        (
            LimitAdvice("subscription-reads", None, 11_999),
            LimitAdvice("Microsoft.Compute/HighCostGet3Min", None, 107, window=180.0),
            LimitAdvice("Microsoft.Compute/HighCostGet30Min", None, 793, window=1800.0),
        ),
        17.0,
    ),
    "azure-openai": Sample(
        {
            "x-ratelimit-remaining-requests": "99",
            "x-ratelimit-remaining-tokens": "9938",
            "retry-after": "1",
            "retry-after-ms": "642",
        },
        (LimitAdvice("requests", None, 99), LimitAdvice("tokens", None, 9938, unit="tokens")),
        0.642,
    ),
    "cloudflare": Sample(
        {"Ratelimit-Policy": '"default";q=1200;w=300', "Ratelimit": '"default";r=0;t=41', "retry-after": "41"},
        (LimitAdvice("default", 1200, 0, 41.0, window=300.0),),
        41.0,
    ),
    "discord": Sample(
        {
            "X-RateLimit-Limit": "5",
            "X-RateLimit-Remaining": "0",
            "X-RateLimit-Reset": "1700000001.500",
            "X-RateLimit-Reset-After": "1.250",
            "X-RateLimit-Bucket": "abcd1234",
            "X-RateLimit-Scope": "user",
            "Retry-After": "2",
        },
        (LimitAdvice("abcd1234", 5, 0, 1.25),),
        2.0,
    ),
    "discord-global": Sample(
        {"Retry-After": "65", "X-RateLimit-Global": "true", "X-RateLimit-Scope": "global"}, (), 65.0
    ),
    "docker-hub": Sample(
        {
            "ratelimit-limit": "100;w=21600",
            "ratelimit-remaining": "20;w=21600",
            "docker-ratelimit-source": "192.0.2.1",
        },
        (LimitAdvice("default", 100, 20, window=21_600.0),),
    ),
    "github": Sample(
        {
            "x-ratelimit-limit": "5000",
            "x-ratelimit-remaining": "4987",
            "x-ratelimit-reset": "1700001350",
            "x-ratelimit-resource": "core",
            "x-ratelimit-used": "13",
        },
        (LimitAdvice("core", 5000, 4987, 1350.0),),
    ),
    "github-secondary": Sample(
        {
            "retry-after": "60",
            "x-ratelimit-limit": "30",
            "x-ratelimit-remaining": "22",
            "x-ratelimit-reset": "1700000045",
            "x-ratelimit-resource": "search",
            "x-ratelimit-used": "8",
        },
        (LimitAdvice("search", 30, 22, 45.0),),
        60.0,
    ),
    "hubspot": Sample(
        {
            "X-HubSpot-RateLimit-Daily": "250000",
            "X-HubSpot-RateLimit-Daily-Remaining": "249999",
            "X-HubSpot-RateLimit-Interval-Milliseconds": "10000",
            "X-HubSpot-RateLimit-Max": "100",
            "X-HubSpot-RateLimit-Remaining": "98",
            "X-HubSpot-RateLimit-Secondly": "10",
            "X-HubSpot-RateLimit-Secondly-Remaining": "9",
        },
        (
            LimitAdvice("daily", 250_000, 249_999, window=86_400.0),
            LimitAdvice("interval", 100, 98, window=10.0),
        ),
    ),
    "jira": Sample(
        {
            "X-RateLimit-Limit": "100",
            "X-RateLimit-Remaining": "0",
            "X-RateLimit-Reset": "2023-11-14T22:18Z",
            "X-RateLimit-NearLimit": "true",
            "RateLimit-Reason": "jira-burst-based",
            "Retry-After": "5",
        },
        (LimitAdvice("default", 100, 0, 280.0),),
        5.0,
    ),
    "notion": Sample({"Retry-After": "3", "content-type": "application/json; charset=utf-8"}, (), 3.0),
    "rapidapi": Sample(
        {
            "X-RateLimit-Limit": "60",
            "X-RateLimit-Remaining": "58",
            "X-RateLimit-Reset": "37",
            "X-RateLimit-Requests-Limit": "1000",
            "X-RateLimit-Requests-Remaining": "987",
            "X-RateLimit-Requests-Reset": "2480013",
            "X-RateLimit-Tokens-Limit": "500000",
            "X-RateLimit-Tokens-Remaining": "498221",
            "X-RateLimit-Tokens-Reset": "2480013",
        },
        (
            LimitAdvice("default", 60, 58, 37.0),
            LimitAdvice("requests", 1000, 987, 2_480_013.0),
            LimitAdvice("tokens", 500_000, 498_221, 2_480_013.0, unit="tokens"),
        ),
    ),
    "reddit": Sample(
        {"x-ratelimit-used": "24", "x-ratelimit-remaining": "576.0", "x-ratelimit-reset": "489"},
        (LimitAdvice("default", None, 576, 489.0),),
    ),
    "shopify": Sample(
        {"X-Shopify-Shop-Api-Call-Limit": "40/40", "Retry-After": "2.0"}, (LimitAdvice("default", 40, 0),), 2.0
    ),
    "slack": Sample({"Retry-After": "30"}, (), 30.0),
    "stripe": Sample({"Stripe-Rate-Limited-Reason": "endpoint-rate", "Stripe-Should-Retry": "true"}),
    "x": Sample(
        {
            "x-rate-limit-limit": "900",
            "x-rate-limit-remaining": "37",
            "x-rate-limit-reset": "1700000840",
            "x-app-limit-24hour-limit": "500",
            "x-app-limit-24hour-remaining": "12",
            "x-app-limit-24hour-reset": "1700040000",
        },
        (
            LimitAdvice("default", 900, 37, 840.0),
            LimitAdvice("app", 500, 12, 40_000.0, window=86_400.0),
        ),
    ),
}
