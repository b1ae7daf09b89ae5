"""The names of rate limit header fields, in every dialect. The reader and the writer take them from here only.

    RateLimit-Policy: "burst";q=100;w=60     RateLimit: "burst";r=50;t=30         the IETF's, from draft 08 on
    RateLimit: limit=100, remaining=50, reset=5                                   draft 07
    RateLimit-Limit: 100, 100;w=60    RateLimit-Remaining: 50    RateLimit-Reset: 5    drafts 00 to 06
    anthropic-ratelimit-input-tokens-limit, -remaining, -reset                    Anthropic
    x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, ...                   OpenAI and others; Kong (-minute)
    X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset                   GitHub and most others

We write the first and the last one. `headers/servers.py` lists which server sends which fields, and the fields that
only one server sends.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

RETRY_AFTER: Final = "Retry-After"  # part of every dialect
RETRY_AFTER_MS: Final = ("Retry-After-Ms", "X-Ms-Retry-After-Ms")


class ListFields(NamedTuple):
    """Two lists of limits with parameters: their quotas, and their current state."""

    policy: str
    state: str
    quota: str = "q"
    window: str = "w"
    unit: str = "qu"
    partition: str = "pk"
    remaining: str = "r"
    reset: str = "t"


class DictionaryField(NamedTuple):
    """One dictionary of three numbers; a list of quotas gives their windows."""

    state: str
    policy: str
    members: tuple[str, str, str] = ("limit", "remaining", "reset")
    window: str = "w"


class ThreeFields(NamedTuple):
    """A field for each of three numbers, and further fields of some servers: the resource, the bucket, the scope."""

    limit: str
    remaining: str
    reset: str
    reset_after: str
    resource: str
    bucket: str
    is_global: str

    @classmethod
    def named(cls, prefix: str) -> ThreeFields:
        """Return the fields that start with a prefix."""
        ends = ("Limit", "Remaining", "Reset", "Reset-After", "Resource", "Bucket", "Global")
        return cls(*(f"{prefix}-{end}" for end in ends))


class GroupedFields(NamedTuple):
    """A field for each limit and number: its name contains the `name` of the limit and `what` the number is.

    `template` contains `{name}`, `{what}` and perhaps `{tier}`; the next three are patterns of their possible values.
    `unit` and `window` (seconds) apply to all these limits; without them, the name of a limit determines them.
    """

    template: str
    name: str
    what: str
    tier: str = ""
    unit: str = ""
    window: float | None = None

    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the names of these fields, in lower case."""
        groups = {part: f"(?P<{part}>{getattr(self, part)})" for part in ("name", "what", "tier")}
        return re.compile(self.template.format(**groups))

    def field(self, name: str, what: str, tier: str = "ratelimit") -> str:
        """Return the name of one field."""
        return self.template.replace("-?", "").format(name=name, what=what, tier=tier)


class LimitFields(NamedTuple):
    """The fields of one limit of one server, by their names; `window` is in seconds, `window_ms` is a field."""

    name: str
    limit: str
    remaining: str
    window_ms: str = ""
    window: float | None = None


class UsedOfLimitField(NamedTuple):
    """One field with the used permits and the limit: `32/40`."""

    field: str


class CountListField(NamedTuple):
    """One field with the remaining permits of several limits: `Microsoft.Compute/HighCostGet3Min;107, ...`.

    `minutes` is the pattern of the window at the end of a name.
    """

    field: str
    minutes: str = "([0-9]{1,4})Min$"


Dialect = ListFields | DictionaryField | ThreeFields | GroupedFields
OwnFields = GroupedFields | LimitFields | UsedOfLimitField | CountListField

IETF: Final = ListFields("RateLimit-Policy", "RateLimit")
X_RATELIMIT: Final = ThreeFields.named("X-RateLimit")
# In the order in which they are read.
DIALECTS: Final[dict[str, Dialect]] = {
    "ietf": IETF,
    "ietf-07": DictionaryField("RateLimit", "RateLimit-Policy"),
    "ietf-06": ThreeFields.named("RateLimit"),
    "anthropic": GroupedFields(
        "anthropic-{tier}-{name}-{what}",
        name="(?:input-|output-)?tokens|requests",
        what="limit|remaining|reset",
        tier="ratelimit|priority|fast",
    ),
    "openai": GroupedFields(
        "x-rate-?limit-{what}-{name}",
        name="(?!after$)[a-z0-9_-]{1,64}",
        what="limit|remaining|reset|renewalperiod",
    ),
    "x": X_RATELIMIT,
    "x-rate-limit": ThreeFields.named("X-Rate-Limit"),
}

# Of all these names and those of `headers/servers.py`, in lower case.
FIELD_PREFIXES: Final = (
    "ratelimit",
    "x-rate",
    "retry-after",
    "anthropic-",
    "x-ms-ratelimit",
    "x-ms-retry-after",
    "x-hubspot-ratelimit",
    "x-shopify-shop-api-call-limit",
    "x-app-limit",
    "x-user-limit",
)
