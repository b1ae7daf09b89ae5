"""Policy: a named set of limits that are decided together, and the cost of a call at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError

Cost = int | Mapping[str, int]
Mode = Literal["enforce", "shadow"]
OnStoreError = Literal["allow", "deny", "local"]

PER_CALL_UNITS: Final = (
    "requests",
    "concurrent-requests",
)  # the units that count calls: an integer cost is charged to these


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits that are decided together, all or nothing, under one name.

    The name separates the keys of policies in the same store. `mode` is `enforce`, or `shadow` to decide and record
    without denying. `on_store_error` decides calls while the store is unavailable.

    An integer cost counts calls: it is charged to the limits in the units `requests` and `concurrent-requests`, or, if
    a policy has none of these and a single unit, to that unit. A mapping gives the cost per unit; other units cost 0.

    With `shares_slot`, keys whose first part is the same are in one slot of a Redis Cluster, so that one step of the
    store can decide them together.
    """

    name: str
    limits: tuple[Limit, ...]
    mode: Mode = "enforce"
    on_store_error: OnStoreError = "deny"
    shares_slot: bool = False
    only: Limit | None = field(init=False, repr=False, compare=False, default=None)  # the limit, if there is only one
    one: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())  # a cost of 1 at each limit
    counted: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())  # units of an integer cost
    units: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())  # the unit of each limit

    if TYPE_CHECKING:  # limits may be given as strings

        def __init__(
            self,
            name: str,
            limits: str | Limit | Iterable[str | Limit],
            mode: Mode = "enforce",
            on_store_error: OnStoreError = "deny",
            shares_slot: bool = False,  # noqa: FBT001, FBT002 - rarely given, and then by name
        ) -> None:
            """Create a policy from limits or strings such as "60/1m"."""

    def __post_init__(self) -> None:
        """Check the arguments; compute which units an integer cost is charged to."""
        set_field = object.__setattr__
        set_field(self, "limits", read_limits(self.limits))
        if not isinstance(self.name, str):
            raise ConfigError(f"must be a string, not {self.name!r}", field="name")
        for option, value, choices in (
            ("mode", self.mode, get_args(Mode)),
            ("on_store_error", self.on_store_error, get_args(OnStoreError)),
        ):
            if value not in choices:
                raise ConfigError(f"must be one of {', '.join(choices)}, not {value!r}", field=option)
        set_field(self, "units", tuple(limit.unit for limit in self.limits))
        units = set(self.units)
        counted = units.intersection(PER_CALL_UNITS) or (units if len(units) == 1 else set())
        set_field(self, "counted", tuple(sorted(counted)))
        set_field(self, "only", self.limits[0] if len(self.limits) == 1 else None)
        set_field(self, "one", tuple(int(limit.unit in counted) for limit in self.limits))

    def with_limits(self, limits: tuple[Limit, ...]) -> Policy:
        """Return this policy with other limits."""
        return Policy(self.name, limits, self.mode, self.on_store_error, self.shares_slot)

    def costs(self, cost: Cost) -> tuple[int, ...]:
        """Return the cost at each limit, in their order."""
        if type(cost) is int and 0 <= cost <= MAX_INTEGER and self.counted:
            return self.one if cost == 1 else tuple([cost * one for one in self.one])
        units = self.units
        if cost.__class__ is dict:  # the usual mapping, without the checks that find out what is wrong with it
            for unit, amount in cost.items():
                if unit not in units or amount.__class__ is not int or not 0 <= amount <= MAX_INTEGER:
                    break
            else:
                return tuple([cost.get(unit, 0) for unit in units])
        if isinstance(cost, int):
            if not self.counted:
                known = ", ".join(sorted(set(units)))
                raise ConfigError(f"an integer is ambiguous in a policy with the units {known}: use a mapping such as "
                                  f"{{'{self.limits[0].unit}': {cost}}}", field="cost")  # fmt: skip
            check_cost(cost)
            return self.costs(int(cost))  # of a subclass
        if not isinstance(cost, Mapping):
            raise ConfigError(f"must be an integer or a mapping of units to integers, not {cost!r}", field="cost")
        for unit, amount in cost.items():
            check_cost(amount, f"cost.{unit}")
            if unit not in units:
                known = ", ".join(sorted(set(units)))
                raise ConfigError(
                    f"no limit of policy {self.name!r} counts {unit!r}: its limits count {known}", field="cost"
                )
        return tuple(cost.get(unit, 0) for unit in units)


Rules = str | Limit | Policy | Iterable[str | Limit]


def read_policy(rules: Rules, name: str = "default") -> Policy:
    """Return the policy for rules: a string, a Limit, several of these, or a Policy."""
    if isinstance(rules, Policy):
        return rules
    return Policy(name, read_limits(rules))


def read_limits(rules: str | Limit | Iterable[str | Limit]) -> tuple[Limit, ...]:
    """Return the limits for one limit or several, each a string or a Limit."""
    if isinstance(rules, (str, Limit)):
        rules = (rules,)
    if not isinstance(rules, Iterable):
        raise ConfigError(
            f"expected a limit such as '60/1m', a Limit, or a list of them, not {rules!r}", field="limits"
        )
    limits = tuple(rule if isinstance(rule, Limit) else Limit.parse(rule) for rule in rules)
    if not limits:
        raise ConfigError("a policy needs at least one limit such as '60/1m'", field="limits")
    names = [limit.name for limit in limits]
    for limit in limits:
        if names.count(limit.name) > 1:
            message = f"two limits are named {limit.name!r}: rename one of them, as in '60/1m name=a'"
            raise ConfigError(message, field="limits")
    return limits


def check_cost(amount: object, name: str = "cost") -> None:
    """Check that an amount is an integer number of permits."""
    if not isinstance(amount, int) or isinstance(amount, bool) or not 0 <= amount <= MAX_INTEGER:
        raise ConfigError(f"must be an integer from 0 to 2**53 - 1, not {amount!r}", field=name)
