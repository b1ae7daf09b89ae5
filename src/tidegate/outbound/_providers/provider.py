"""A Provider: a remote API, its limits, and how its key is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tidegate._policy import Policy
from tidegate.core._bounds import ceil_div
from tidegate.errors import ConfigError
from tidegate.outbound._providers.profile import TOKEN_UNITS, Profile, matches_model
from tidegate.outbound._providers.profile_file import shipped_profile

if TYPE_CHECKING:
    from tidegate._policy import Cost, Key
    from tidegate.core import Limit
    from tidegate.outbound._providers.pool import Ceiling, Pool
    from tidegate.outbound._providers.prices import Prices
    from tidegate.outbound._providers.secret import Secret

QuotaScope = Literal["host", "path", "credential", "model"]
Learn = Literal["lower", "off"]

REQUESTS_UNIT: Final = "requests"
CONCURRENCY_UNIT: Final = "concurrent-requests"
CATCH_ALL_DOMAIN: Final = "*"


class EndpointCost(NamedTuple):
    """Paths with their own cost. `*` matches one segment or, at the end, everything below."""

    path: str
    methods: tuple[str, ...] = ()
    cost: Cost = 1

    @property
    def pattern(self) -> re.Pattern[str]:
        """The path as a compiled regular expression."""
        begin, beneath = (self.path[:-2], r"(?:/.*)?") if self.path.endswith("/*") else (self.path.rstrip("/"), "/?")
        return re.compile("/".join("[^/]+" if part == "*" else re.escape(part) for part in begin.split("/")) + beneath)


class KeyLocation(NamedTuple):
    """Where the key is sent: in a header (with a prefix, as in `Bearer …`) or in a query parameter.

    The key is sent only over https, or to this machine, unless `plain_http` allows plain http to any host.
    """

    kind: Literal["header", "query"]
    name: str
    prefix: str = ""
    plain_http: bool = False


class Retries(NamedTuple):
    """How often a refused request is retried at most, and how many seconds all retries may take."""

    max_retries: int = 0
    within: float = 60.0


NO_RETRIES: Final = Retries()


class ModelLimits(NamedTuple):
    """The limits of the models that match a pattern such as `gpt-*`."""

    pattern: str
    limits: tuple[Limit, ...]


class OutputReserve(NamedTuple):
    """How much is reserved for the output: what this percentage of recent outputs took; None: the maximum."""

    percent: int | None = None


MAXIMUM_OUTPUT: Final = OutputReserve()


def logged_outputs(limits: tuple[Limit, ...], profile: Profile) -> tuple[Limit, ...]:
    """Return the limits with logs for outputs that count when they are produced.

    What is reserved for a stream is moved while it arrives, but the levels of other limits refill meanwhile, as if it
    had been used. No bucket is exceeded by what a log of its burst allows: at most the burst within the time in which
    it refills.
    """
    if profile.output_counted != "produced":
        return limits
    return tuple(
        _as_log(limit)
        if (limit.rules.refills or limit.rules.weighted) and "output" in profile.counts.get(limit.unit, ())
        else limit
        for limit in limits
    )


def _as_log(limit: Limit) -> Limit:
    period = timedelta(microseconds=ceil_div(limit.length * limit.burst, limit.quota))
    return replace(limit, quota=limit.burst, period=period, algorithm="sliding_log")


@dataclass(frozen=True, slots=True)
class Provider:
    """An API with a quota. Immutable: a changed file becomes another Provider.

    `limits` all apply. `per` names what has a separate quota: each `host` of the domain, each `path` of the endpoints,
    each `credential`, each `model`; by default there is one quota for all. `models` are limits that replace `limits`
    for the models of a pattern; `aliases` are other names of models. `profile` is how tokens are counted, `prices` what
    the calls of each model cost, `unbounded` what things cost that a request uses although they are not in it, by unit.
    `api_key` is kept in memory only; `key_from` is the variable (`${NAME}`) or the file
    that it was read from, if that is not `file`. `ceilings` are money limits beyond this account. A `pool` has
    members: each is a Provider with the name of its `member`, and perhaps a `url` that requests are sent to instead.
    """

    domain: str
    limits: tuple[Limit, ...]
    name: str = ""
    endpoints: tuple[EndpointCost, ...] = ()
    per: tuple[QuotaScope, ...] = ()
    api_key: Secret | None = None
    key_location: KeyLocation | None = None
    learn: Learn = "lower"
    retries: Retries = NO_RETRIES
    estimate: Mapping[str, int] = field(default_factory=dict)
    on_store_error: Literal["allow", "deny", "local"] = "deny"
    file: str | None = None
    key_from: str | None = None
    profile: Profile | None = None
    models: tuple[ModelLimits, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    output_reserve: OutputReserve = MAXIMUM_OUTPUT
    strict: bool = False
    unbounded: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    prices: Prices | None = None
    ceilings: tuple[Ceiling, ...] = ()
    pool: Pool | None = None
    member: str = ""
    url: str = ""
    policy: Policy = field(init=False, repr=False, compare=False)
    counting: Profile = field(init=False, repr=False, compare=False)  # the profile, or the default one
    reads_requests: bool = field(init=False, repr=False, compare=False)  # whether bodies matter
    named_models: frozenset[str] = field(init=False, repr=False, compare=False)  # in full, without `*`
    limits_money: bool = field(init=False, repr=False, compare=False)
    limits_usage: bool = field(init=False, repr=False, compare=False)  # whether tokens or money are limited
    has_one_account: bool = field(init=False, repr=False, compare=False)  # for all requests
    changes_requests: bool = field(init=False, repr=False, compare=False)  # whether it adds a key, or has another URL
    _names: dict[str, str] = field(init=False, repr=False, compare=False)  # of models, by their lower-case form
    _variants: dict[str, Provider] = field(init=False, repr=False, compare=False)
    _patterns: tuple[tuple[re.Pattern[str], EndpointCost], ...] = field(init=False, repr=False, compare=False)
    _default_cost: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the policy and the cost of a request."""
        set_field = object.__setattr__
        set_field(self, "counting", self.profile or shipped_profile())
        set_field(self, "limits", logged_outputs(self.limits, self.counting))
        models = (each._replace(limits=logged_outputs(each.limits, self.counting)) for each in self.models)
        set_field(self, "models", tuple(models))
        name = f"provider:{self.domain}:{self.member}" if self.member else f"provider:{self.domain}"
        set_field(self, "policy", Policy(name, self.limits, "enforce", self.on_store_error))
        set_field(self, "name", self.name or self.domain)
        set_field(self, "_patterns", tuple((endpoint.pattern, endpoint) for endpoint in self.endpoints))
        set_field(self, "_default_cost", self._cost(1))
        units = {limit.unit for limits in (self.limits, *(each.limits for each in self.models)) for limit in limits}
        reads = self.models or "model" in self.per or units.intersection(TOKEN_UNITS) or self.prices is not None
        set_field(self, "reads_requests", bool(reads))
        limits_money = self.prices is not None and (bool(self.ceilings) or self.prices.unit in units)
        set_field(self, "limits_money", limits_money)
        set_field(self, "limits_usage", limits_money or bool(units.intersection(TOKEN_UNITS)))
        for member in () if self.pool is None else self.pool.members:
            for name in ("reads_requests", "limits_money", "limits_usage"):
                set_field(self, name, getattr(self, name) or getattr(member.provider, name))
        set_field(self, "named_models", self._find_named_models())
        names = {name.lower(): name for name in sorted(self.named_models)}
        set_field(self, "_names", names | {alias.lower(): name for alias, name in self.aliases.items()})
        set_field(self, "has_one_account", not (self.per or self.models or self.member))
        set_field(self, "changes_requests", bool(self.url) or self.api_key is not None)
        set_field(self, "_variants", {each.pattern: self._variant(each) for each in self.models})
        for endpoint in self.endpoints:
            self._check_cost(endpoint)

    def _find_named_models(self) -> frozenset[str]:
        patterns = [each.pattern for each in self.models]
        priced = () if self.prices is None else (name for name, _ in self.prices.models)
        return frozenset(name for name in (*patterns, *priced, *self.aliases.values()) if CATCH_ALL_DOMAIN not in name)

    def _variant(self, models: ModelLimits) -> Provider:
        return replace(self, limits=models.limits, models=())

    def model_pattern(self, model: str | None) -> str | None:
        """Return the first pattern with its own limits that a model matches; `*` matches an unknown model, too."""
        if not self.models:
            return None
        return next((each.pattern for each in self.models if matches_model(each.pattern, model or "")), None)

    def resolve_model(self, model: str | None) -> str | None:
        """Return the model that a name stands for, as the file writes it."""
        return model if model is None else self._names.get(model.lower(), model)

    def quota_name(self, model: str | None, *, shares_unnamed: bool) -> str | None:
        """Return the model whose quota a call uses, if each model has its own; None: that of all other models.

        If the file names models, these have their own; otherwise each has, unless `shares_unnamed` says that whoever
        names the model is not trusted: each name that he invents would have a quota.
        """
        if model is None or model in self.named_models:
            return model
        return None if self.named_models or shares_unnamed else model

    def for_pattern(self, pattern: str | None) -> Provider:
        """Return the provider with the limits of a pattern."""
        return self if pattern is None else self._variants[pattern]

    def _check_cost(self, endpoint: EndpointCost) -> None:
        """Refuse an endpoint whose cost is in a unit that no limit counts, or exceeds a limit."""
        for limit, amount in zip(self.limits, self.policy.costs(endpoint.cost), strict=True):
            if amount > limit.burst:
                message = (
                    f"{amount} exceeds the maximum of limit {limit.name!r} ({limit.burst}): no request could be sent"
                )
                raise ConfigError(message, field="cost")

    def _cost(self, cost: Cost) -> dict[str, int]:
        """Return a cost by unit: an integer counts requests; every request holds one slot."""
        given = dict(cost) if isinstance(cost, Mapping) else {REQUESTS_UNIT: cost}
        units = {limit.unit for limit in self.limits}
        combined = {REQUESTS_UNIT: 1, CONCURRENCY_UNIT: 1, **self.estimate, **given}
        return {unit: amount for unit, amount in combined.items() if unit in units}

    def endpoint(self, path: str, method: str = "GET") -> EndpointCost | None:
        """Return the first endpoint that matches a request."""
        for pattern, endpoint in self._patterns:
            if pattern.fullmatch(path) and (not endpoint.methods or method.upper() in endpoint.methods):
                return endpoint
        return None

    def cost(self, endpoint: EndpointCost | None) -> Mapping[str, int]:
        """Return the cost of a request by unit, as far as it is known before sending."""
        return self._default_cost if endpoint is None else self._cost(endpoint.cost)

    @property
    def other_files(self) -> tuple[str, ...]:
        """The files that its own file names: the key, the profile, the prices; those of its members, too."""
        if self.pool is not None:
            return tuple(dict.fromkeys(file for each in self.pool.members for file in each.provider.other_files))
        key = None if self.key_from is None or self.key_from.startswith("${") else self.key_from
        files = key, self.profile and self.profile.file, self.prices and self.prices.file
        return tuple(file for file in files if file)

    def for_key(self, key: Key) -> Provider:
        """Return the member of a pool that the key of an account belongs to; without a pool, this provider."""
        for member in () if self.pool is None or isinstance(key, str) else self.pool.members:
            if f"member={member.name}" in key:
                return member.provider
        return self

    @property
    def title(self) -> str:
        """Its name, with that of the member of a pool: `gpt/eu`."""
        return f"{self.name}/{self.member}" if self.member else self.name

    @property
    def longest(self) -> int:
        """The longest period of its limits, in microseconds."""
        return max(limit.length for limit in self.limits)

    def __str__(self) -> str:
        """Return the name and the limits."""
        return f"{self.name} ({', '.join(map(str, self.limits))})"
