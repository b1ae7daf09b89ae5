"""Which fields well-known servers send: one entry per server, with the documentation that it was taken from.

An entry names the dialects of `headers/dialects.py` that the server uses, or declares fields that only this server
sends. `tests/headers/server_samples.py` has a sample response for each entry.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tidegate.headers._dialects import (
    DIALECTS,
    CountListField,
    Dialect,
    GroupedFields,
    LimitFields,
    OwnFields,
    UsedOfLimitField,
)

DAY: Final = 86_400.0  # seconds


class ServerFields(NamedTuple):
    """How a server announces its limits: the dialects that it uses, and the fields that only this server sends.

    `retry_after` is whether a refusal has Retry-After.
    """

    source: str
    dialects: tuple[Dialect, ...] = ()
    own: tuple[OwnFields, ...] = ()
    retry_after: bool = True


SERVERS: Final[dict[str, ServerFields]] = {
    # Requests per subscription and tenant, and per kind of resource; refusals have Retry-After.
    "azure": ServerFields(
        "https://learn.microsoft.com/azure/azure-resource-manager/management/request-limits-and-throttling",
        own=(
            GroupedFields(
                "x-ms-ratelimit-{what}-{name}", name="(?!resource$)[a-z-]{1,64}", what="remaining", unit="requests"
            ),
            CountListField("x-ms-ratelimit-remaining-resource"),
        ),
    ),
    # As OpenAI's, without resets; Retry-After-Ms beside Retry-After.
    "azure-openai": ServerFields(
        "https://learn.microsoft.com/azure/ai-services/openai/how-to/quota", (DIALECTS["openai"],)
    ),
    # The lists of the IETF draft.
    "cloudflare": ServerFields(
        "https://developers.cloudflare.com/fundamentals/api/reference/limits/", (DIALECTS["ietf"],)
    ),
    # Requests per bucket of endpoints; the reset is an instant with a fraction, Reset-After a delay with a fraction.
    "discord": ServerFields("https://discord.com/developers/docs/topics/rate-limits", (DIALECTS["x"],)),
    # A global refusal has no numbers but Retry-After.
    "discord-global": ServerFields("https://discord.com/developers/docs/topics/rate-limits#global-rate-limit"),
    # Pulls, with the window in seconds behind each number.
    "docker-hub": ServerFields(
        "https://docs.docker.com/docker-hub/usage/pulls/", (DIALECTS["ietf-06"],), retry_after=False
    ),
    # Requests per resource (core, search, graphql); the reset is an instant.
    "github": ServerFields(
        "https://docs.github.com/rest/using-the-rest-api/rate-limits-for-the-rest-api#checking-the-status-of-your-rate-limit",
        (DIALECTS["x"],),
        retry_after=False,
    ),
    # Secondary limits: status 403 or 429 with Retry-After; the numbers are those of the primary limit.
    "github-secondary": ServerFields(
        "https://docs.github.com/rest/using-the-rest-api/rate-limits-for-the-rest-api#exceeding-the-rate-limit",
        (DIALECTS["x"],),
    ),
    # Requests per day, and per interval in milliseconds.
    "hubspot": ServerFields(
        "https://developers.hubspot.com/docs/developer-tooling/platform/usage-guidelines",
        own=(
            LimitFields("daily", "x-hubspot-ratelimit-daily", "x-hubspot-ratelimit-daily-remaining", window=DAY),
            LimitFields(
                "interval",
                "x-hubspot-ratelimit-max",
                "x-hubspot-ratelimit-remaining",
                window_ms="x-hubspot-ratelimit-interval-milliseconds",
            ),
        ),
        retry_after=False,
    ),
    # The reset is an instant without seconds.
    "jira": ServerFields("https://developer.atlassian.com/cloud/jira/platform/rate-limiting/", (DIALECTS["x"],)),
    "notion": ServerFields("https://developers.notion.com/reference/request-limits"),
    # The quota of the plan, for requests and for objects that the API counts; the reset is a delay in seconds. The rate
    # limit of an API has the usual fields.
    "rapidapi": ServerFields(
        "https://docs.rapidapi.com/docs/response-headers",
        (DIALECTS["x"],),
        own=(GroupedFields("x-ratelimit-{name}-{what}", name="[a-z0-9_-]{1,64}", what="limit|remaining|reset"),),
        retry_after=False,
    ),
    # Remaining requests with a fraction; the reset is a delay in seconds.
    "reddit": ServerFields(
        "https://support.reddithelp.com/hc/en-us/articles/16160319875092-Reddit-Data-API-Wiki",
        (DIALECTS["x"],),
        retry_after=False,
    ),
    # A leaky bucket: its level and its size. Retry-After has a fraction.
    "shopify": ServerFields(
        "https://shopify.dev/docs/api/admin-rest/usage/rate-limits",
        own=(UsedOfLimitField("x-shopify-shop-api-call-limit"),),
    ),
    "slack": ServerFields("https://docs.slack.dev/apis/web-api/rate-limits/"),
    # No numbers: Stripe-Rate-Limited-Reason names the limit. Clients are told to back off exponentially.
    "stripe": ServerFields("https://docs.stripe.com/rate-limits", retry_after=False),
    # Requests per 15 minutes and endpoint, and per day for the app and for the user; the resets are instants.
    "x": ServerFields(
        "https://docs.x.com/x-api/fundamentals/rate-limits",
        (DIALECTS["x-rate-limit"],),
        own=(
            GroupedFields(
                "x-{name}-limit-24hour-{what}",
                name="app|user",
                what="limit|remaining|reset",
                unit="requests",
                window=DAY,
            ),
        ),
        retry_after=False,
    ),
}

OWN_FIELDS: Final[tuple[OwnFields, ...]] = tuple(own for server in SERVERS.values() for own in server.own)
