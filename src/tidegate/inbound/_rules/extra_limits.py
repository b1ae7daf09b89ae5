"""Limits besides the categories: `application_limits` for all requests of a client, `default_limits` for each route.

Both are categories that every request matches, unless it is exempt. The count of `default_limits` belongs to the route
that the framework matches; requests without a known route share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate._policy.model import read_limits
from tidegate.core import Limit
from tidegate.errors import ConfigError
from tidegate.inbound._rules.closed_limit import is_closed, parse_inbound_limit
from tidegate.inbound._rules.model import APPLICATION_LIMITS, DEFAULT_LIMITS, Category

if TYPE_CHECKING:
    from tidegate.inbound._rules.model import Rules

OneOrMoreLimits = str | Limit | Iterable[str | Limit]
DEFAULT_ALGORITHM: Final = "sliding_log"
SEPARATORS: Final = ";,|"  # of limits, in strings of other rate limiters


def read_exact_limits(limits: OneOrMoreLimits) -> tuple[Limit, ...]:
    """Read limits; strings that name no algorithm use sliding_log."""
    if isinstance(limits, Limit) or not isinstance(limits, Iterable):
        return read_limits(limits)
    several = [limits] if isinstance(limits, str) else limits
    return read_limits([_read_exact_limit(one) if isinstance(one, str) else one for one in several])


def _read_exact_limit(text: str) -> Limit:
    try:
        return with_default_algorithm(parse_inbound_limit(text), text, DEFAULT_ALGORITHM)
    except ConfigError as error:
        if any(separator in text for separator in SEPARATORS):
            hint = "write several limits as a list such as ['5/1m', '100/1h'], or use tidegate.compat.limits.parse_many"
            raise ConfigError(f"{error.detail}: {hint}", field="limits") from None
        raise


def with_default_algorithm(limit: Limit, text: str, algorithm: str) -> Limit:
    """Use the given algorithm if the string names none."""
    words = text.split()
    named = not limit.quota or limit.algorithm in words or limit.calendar is not None or limit.burst != limit.quota
    return limit if named else replace(limit, algorithm=algorithm)


class ExtraLimits:
    """The options `application_limits` and `default_limits` of a middleware; they replace those of the file."""

    def __init__(
        self, application: OneOrMoreLimits | Category | None, default: OneOrMoreLimits | Category | None
    ) -> None:
        """Read the limits; raises ConfigError."""
        self._application = read_category(APPLICATION_LIMITS, application)
        self._default = read_category(DEFAULT_LIMITS, default)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return self._application is not None or self._default is not None

    def add_to(self, rules: Rules) -> Rules:
        """Return the rules with these limits."""
        if not self:
            return rules
        return replace(
            rules,
            application_limits=self._application or rules.application_limits,
            default_limits=self._default or rules.default_limits,
        )


def read_category(name: str, limits: OneOrMoreLimits | Category | None) -> Category | None:
    """Return the category of such limits; None if there are none."""
    if limits is None or isinstance(limits, Category):
        return limits
    try:
        found = read_exact_limits(limits)
    except ConfigError as error:
        raise ConfigError(error.detail, field=name) from None
    return make_category(name, named_after(name, found))


def named_after(category: str, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Name limits without a name of their own after their category."""
    return tuple(limit if has_own_name(limit) else rename(category, limit) for limit in limits)


def limits_text(limits: Iterable[Limit]) -> str:
    """Write limits in short, such as `5/1m, 100/1h`."""
    return ", ".join(f"{limit.quota}/{limit.period}" for limit in limits)


def has_own_name(limit: Limit) -> bool:
    """Return whether a limit has a name that is not made of its period."""
    return replace(limit, name="").name != limit.name


def rename(category: str, limit: Limit) -> Limit:
    """Name a limit after its category and its period, as responses show it."""
    return replace(limit, name=f"{category.removesuffix('_limits')}-{limit.name}")


def make_category(name: str, limits: tuple[Limit, ...]) -> Category:
    """Return the category of these limits; a limit of 0 stays closed while the store is unavailable."""
    return Category(name, Policy(name, limits, on_store_error="deny" if is_closed(limits) else "local"))
