"""The keyword options of the middlewares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, get_args

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import MAX_PREFIXES
from tidegate.inbound._client.request import describe_function_problem
from tidegate.inbound._rules.model import ADMIN_PATH, RESET_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate.inbound._client.request import KeyOf, Request
    from tidegate.inbound._limiting.category_limiter import Counts
    from tidegate.inbound._limiting.plan_limiters import PlanOf
    from tidegate.inbound._limiting.route_limit import RouteLimit
    from tidegate.inbound._responses.response import DenialHandler
    from tidegate.inbound._rules.extra_limits import OneOrMoreLimits
    from tidegate.inbound._rules.model import ResetTime
    from tidegate.observe import Observer
    from tidegate.stores._lease import Lease

Unknown = Literal["allow", "limit"]
OnMessage = Literal["close", "drop"]
PARAMETERS: Final = ("config", "store", "trusted_proxies", "headers", "clock")  # named in the signature
MIN_TOKEN_LENGTH: Final = 16
MAX_RELOAD_SECONDS: Final = 86_400


class LimitsOptions(TypedDict, total=False):
    """The keyword arguments that middlewares and `Limits` have in common; docs/reference/inbound.md has the table."""

    key: KeyOf | None  # returns the key of a request; None: limit by address
    ipv4_prefix: int  # bits of an IPv4 address that identify a client
    ipv6_prefix: int  # bits of an IPv6 address that identify a client
    unknown: Unknown  # whether requests without an address are limited
    lease: bool | float | Lease | None  # lease permits from a shared store
    denied: DenialHandler | None  # returns a custom response to denied requests
    exempt_when: Callable[[Request], bool] | None  # returns whether a request is exempt from all limits
    # Block clients after this many denials per period, such as "20/1m"; several rules: {"20/1m": "10m", …}.
    block_after: str | Mapping[str, str] | None
    block_for: str | None  # how long clients are blocked
    reset_time: ResetTime  # what X-RateLimit-Reset shows: when all permits are available, or the next
    observer: Observer | None  # called for every decision
    log_every: int  # log every n-th check; 0: none
    log_burst: int  # denials logged per category and second


class Options(LimitsOptions, total=False):
    """The keyword arguments of the middlewares."""

    plan: PlanOf | None  # returns the plan of a request; None: the category's own limits
    application_limits: OneOrMoreLimits | RouteLimit | None  # limits of each client for all routes together
    default_limits: OneOrMoreLimits | RouteLimit | None  # the same for each route without limits of its own
    count: Mapping[str, Counts] | None  # by category: whether a response counts
    root_path: str  # a prefix that the application removes from paths itself
    on_message: OnMessage  # what to do with a websocket message over the limit
    admin: str | bool  # the path of the admin endpoint
    admin_token: str | None  # allows access to the admin endpoint from any address
    reload: float  # seconds between checks of the file


def check_combinations(options: Mapping[str, Any], headers: object) -> None:
    """Raise ConfigError for an option that another one makes useless."""
    if options.get("admin") is False and options.get("admin_token"):
        raise ConfigError("cannot be combined with admin=False, which removes the endpoint", field="admin_token")
    if options.get("reset_time") == "next" and headers in ("ietf", "none"):
        raise ConfigError(f"cannot be combined with headers={headers!r}, which have no such field", field="reset_time")


def check_options(options: dict[str, Any], *, coroutines: bool) -> None:
    """Raise ConfigError for unknown options and invalid values; `coroutines`: `key` may be a coroutine function."""
    for name, value in options.items():
        check = CHECKS.get(name)
        if check is None:
            known = (*PARAMETERS, *CHECKS)
            expected = did_you_mean(name, known) or f"expected one of {', '.join(known)}"
            raise ConfigError(f"unknown option: {expected}", field=name)
        awaited = coroutines and name == "key"
        problem = describe_function_problem(value, "request", coroutines=True) if awaited else check(value)
        if problem:
            raise ConfigError(f"{problem}, not {value!r}" if name != "admin_token" else problem, field=name)


def _require(is_valid: Callable[[Any], bool], expected: str) -> Callable[[Any], str | None]:
    return lambda value: None if is_valid(value) else f"must be {expected}"


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return _require(lambda value: value in choices, f"one of {', '.join(choices)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _prefix_length(name: str) -> Callable[[Any], str | None]:
    longest = MAX_PREFIXES[name]
    return _require(
        lambda value: isinstance(value, int) and _is_number(value) and 1 <= value <= longest,
        f"an integer from 1 to {longest}",
    )


def _function_of(*arguments: str) -> Callable[[Any], str | None]:
    return lambda value: describe_function_problem(value, *arguments)


NON_NEGATIVE_INTEGER: Final = _require(
    lambda value: isinstance(value, int) and _is_number(value) and value >= 0, "a non-negative integer"
)
CHECKS: Final[dict[str, Callable[[Any], str | None]]] = {
    "key": _function_of("request"),
    "plan": _function_of("request"),
    "ipv4_prefix": _prefix_length("ipv4_prefix"),
    "ipv6_prefix": _prefix_length("ipv6_prefix"),
    "unknown": _one_of(*get_args(Unknown)),
    "lease": lambda _: None,  # read_lease checks it
    "denied": _function_of("request", "decision"),
    "exempt_when": _function_of("request"),
    "application_limits": lambda _: None,  # ExtraLimits checks it
    "default_limits": lambda _: None,
    "block_after": lambda _: None,  # read_block checks it
    "block_for": lambda _: None,
    "reset_time": _one_of(*RESET_TIMES),
    "count": _require(
        lambda value: (
            value is None
            or (
                hasattr(value, "values")
                and all(describe_function_problem(each, "request", "status") is None for each in value.values())
            )
        ),
        "a mapping from category names to functions of request and status",
    ),
    "root_path": _require(
        lambda value: isinstance(value, str) and (not value or value.startswith("/")), "a path such as '/v1'"
    ),
    "on_message": _one_of(*get_args(OnMessage)),
    "admin": _require(
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value.startswith("/")),
        f"a path such as {ADMIN_PATH!r}, True or False",
    ),
    "admin_token": _require(
        lambda value: value is None or (isinstance(value, str) and value.isascii() and len(value) >= MIN_TOKEN_LENGTH),
        f"a string of at least {MIN_TOKEN_LENGTH} ASCII characters",
    ),
    "observer": _function_of("record"),
    "log_every": NON_NEGATIVE_INTEGER,
    "log_burst": NON_NEGATIVE_INTEGER,
    "reload": _require(
        lambda value: _is_number(value) and 0 < value <= MAX_RELOAD_SECONDS,
        f"a number of seconds above 0 and at most {MAX_RELOAD_SECONDS}",
    ),
}
