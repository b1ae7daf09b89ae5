"""Which account a request is charged to, how much is reserved for it, and how long its output may become.

lenient   reserves what most outputs needed (see `learned_sizes`), or else the bound; the output may become longer
strict    the output never becomes longer than what is reserved before the request is sent. The bound of the request is
          reserved in full if there is room for it now. If not, or if money is limited or the provider charges the
          bound, what most outputs needed is reserved, and the bound in the request is lowered to that; an output that
          ends there is counted (`truncated`)

If money is limited, the input of a strict call is paid for as if each byte were a token, unless the program's tokenizer
counts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast
from urllib.parse import urlsplit

from tidegate._policy.units import MICROS
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import ConfigError
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._providers.prices import CURRENCY, ModelPrice
from tidegate.outbound._providers.profile import ANY_ENDPOINT, WEBSOCKET
from tidegate.outbound._providers.provider import CATCH_ALL_DOMAIN
from tidegate.outbound._quota.decoding import decoded
from tidegate.outbound._quota.exchange import credential_of
from tidegate.outbound._quota.form_body import is_form
from tidegate.outbound._quota.json_body import repeats_keys
from tidegate.outbound._quota.production import most_in_a_period
from tidegate.outbound._quota.request_tokens import RequestTokens, path_of, read_request, units_of
from tidegate.outbound._quota.unbounded import (
    may_contain,
    repeated_key,
    unknown_cost,
    unreadable_body,
    unset_bound,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate._policy import Cost, Key
    from tidegate.outbound._providers.provider import EndpointCost, Provider
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.exchange import OutboundRequest
    from tidegate.outbound._quota.learned_sizes import LearnedKey, LearnedSizes
    from tidegate.outbound._quota.request_tokens import Tokenizer

STRICT_INPUT_PERCENT: Final = 99  # of recent inputs that had no more tokens per byte than a strict call reserves
INPUT_PERCENT: Final = 50
TOKENS_UNIT: Final = "tokens"
FREE_METHODS: Final = ("GET", "HEAD", "OPTIONS", "DELETE")  # of requests that no model answers
NOT_COUNTED: Final = ANY_ENDPOINT._replace(counted=False)
SIGNATURE_PREFIX: Final = "AWS4-"  # in Authorization
DIGEST_HEADERS: Final = ("content-digest", "digest", "content-md5", "x-amz-content-sha256")


class CallPlan(NamedTuple):
    """What is reserved for a call, and what is sent.

    `input_tokens` and `output_tokens` (of each output) are parts of the cost; `first_output` is less if the output is
    streamed, counts when it is produced, and more is reserved while it arrives. `lowers` is whether the request is sent
    with its bound lowered to `output_tokens`. `money` is what the call may cost, if the provider has prices; it
    includes `paid_input` tokens of input. `fits` is whether the limits of a member of a pool can ever allow all of it:
    a lenient call reserves less otherwise.
    """

    cost: Cost
    request: RequestTokens | None = None
    learned_key: LearnedKey | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    first_output: int = 0
    lowers: bool = False
    money: int = 0
    paid_input: int = 0
    fits: bool = True

    @property
    def truncates_at(self) -> int | None:
        """The tokens at which each output ends, because the bound of the request was lowered; None: it was not."""
        return self.output_tokens if self.lowers else None

    @property
    def body(self) -> bytes | None:
        """The body that is sent in an attempt with this plan, instead of the request's; None: the request's."""
        return self.request.clamped(self.output_tokens) if self.lowers and self.request is not None else None


class TokenEstimates(NamedTuple):
    """What estimates are based on: sizes learned from responses, and the tokenizer of the user."""

    learned: LearnedSizes
    tokenizer: Tokenizer | None = None


def key_of(
    provider: Provider,
    call: OutboundRequest,
    model: str | None = None,
    pattern: str | None = None,
    *,
    shares_unnamed: bool = False,
) -> Key:
    """Return the key of the quota that a request is charged to; `pattern` is that of its model's limits.

    `shares_unnamed`: models that the provider file does not name share a quota.
    """
    if not provider.per and pattern is None and not provider.member:
        return provider.domain
    parts = [provider.domain, f"member={provider.member}"] if provider.member else [provider.domain]
    if "host" in provider.per:
        parts.append(f"host={host_of(call.url)}")
    if "path" in provider.per:
        endpoint = endpoint_of(provider, call)
        parts.append(f"path={endpoint.path if endpoint else CATCH_ALL_DOMAIN}")
    if "credential" in provider.per:
        parts.append(f"credential={credential_of(provider.key_location, call)}")
    named = provider.quota_name(model, shares_unnamed=shares_unnamed) if "model" in provider.per else None
    if "model" in provider.per and (named is not None or pattern is None):
        parts.append(f"model={named or CATCH_ALL_DOMAIN}")
    elif pattern is not None:
        parts.append(f"models={pattern}")
    return tuple(parts)


def endpoint_of(provider: Provider, call: OutboundRequest) -> EndpointCost | None:
    """Return the endpoint with its own cost that a request matches."""
    return provider.endpoint(urlsplit(call.url).path or "/", call.method) if provider.endpoints else None


def request_of(provider: Provider, call: OutboundRequest, model: str | None = None) -> RequestTokens | None:
    """Read what a request asks for, with the model that its name stands for; None: the provider needs none of it."""
    if not provider.reads_requests:
        return None
    if model is None and call.parsed is not None and call.parsed[0] is provider:
        return call.parsed[1]
    return read_call(provider, call, model)


def read_call(provider: Provider, call: OutboundRequest, model: str | None = None) -> RequestTokens:
    """Read what a request asks for, whether its provider needs that or not."""
    body = call.body()
    request = read_request(provider.counting, call.url, body)
    encoded = form = None
    if body and not request.document and (coding := call.header("content-encoding")):
        encoded, body = body, decoded(body, coding)
        request = read_request(provider.counting, call.url, body)
    if request.endpoint.amount and not request.document:
        form = call.form() if not body else body if body is not encoded and is_form(body) else None
        request = request if form is None else request.with_form(form)
    if not request.document and not is_understood(call, request, body, form):
        request = request._replace(readable=False)
    method = call.method.upper()
    if method in FREE_METHODS and not call.is_permit:
        request = _without_model(provider, call, request)
    if request.unbounded:
        request = with_given_costs(provider, request)
    if model is None and provider.prices is None and not provider.named_models:
        return request
    named = provider.resolve_model(model or request.model)
    if provider.prices is not None and request.endpoint.counted and method not in FREE_METHODS:
        others = () if model is not None else map(provider.resolve_model, request.other_models)
        kind = request.endpoint.kind
        prices = [provider.prices.find(each, kind) for each in (named, *others)]
        return request._replace(model=named, price=max(prices, key=ModelPrice.rank))
    return request if named == request.model else request._replace(model=named)


def is_understood(call: OutboundRequest, request: RequestTokens, body: bytes | None, form: bytes | None) -> bool:
    """Return whether a request without a JSON object says what it may cost: it has no body, or a form with a file.

    `form` is what could be read of a form that says how many images, or others of a kind, are requested.
    """
    if call.is_permit or not request.endpoint.counted:
        return True
    if request.endpoint.amount and form is None:
        return call.replays if body is None else not body
    if request.endpoint.media or request.endpoint.amount:
        return True
    if body is None:
        return call.replays
    return not body or not request.endpoint.has_output


def _without_model(provider: Provider, call: OutboundRequest, request: RequestTokens) -> RequestTokens:
    """Return a request that no model answers; a WebSocket, which begins as one, may carry any number of calls."""
    if (call.header("upgrade") or "").strip().lower() == WEBSOCKET:
        return request._replace(unbounded=(WEBSOCKET,), unreported=True, hidden=WEBSOCKET, endpoint=NOT_COUNTED)
    if request.unbounded:
        request = request._replace(unbounded=(), unreported=False, hidden="")
    if request.endpoint.counted and not provider.estimate:
        return request._replace(endpoint=NOT_COUNTED, bound=0, times=1, stated=True)
    return request


def may_be_unreported(provider: Provider, call: OutboundRequest) -> bool:
    """Return whether the response to a request may not report its usage, without parsing the request."""
    unbounded = provider.counting.unbounded
    if provider.counting.read_path(path_of(call.url)).unbounded or call.header("upgrade"):
        return True
    return unbounded.unreported_pattern is not None and may_contain(unbounded.unreported_pattern, call.body() or b"")


def with_given_costs(provider: Provider, request: RequestTokens) -> RequestTokens:
    """Return a request with the costs that the provider file gives to what is not in the request."""
    given = [provider.unbounded[name] for name in request.unbounded if name in provider.unbounded]
    left = tuple(name for name in request.unbounded if name not in provider.unbounded)
    if not given:
        return request
    unit = "" if provider.prices is None else provider.prices.unit
    tokens, money = (min(MAX_INTEGER, sum(each.get(name, 0) for each in given)) for name in (TOKENS_UNIT, unit))
    request = request._replace(unbounded=left, given_tokens=tokens, given_money=money)
    if request.hidden in left or not request.hidden:
        return request._replace(fixed=request.fixed + tokens)
    price = ModelPrice(unit) if unit else None  # it costs what the file says, whatever its body contains
    return request._replace(endpoint=NOT_COUNTED, bound=0, times=1, stated=True, price=price)


def cost_of(account: Account, call: OutboundRequest, asked: Mapping[str, int] | None) -> Cost:
    """Return the cost of a request: what the program `asked` for, the endpoint's cost, or an estimate."""
    return plan_call(account, call, request_of(account.provider, call), None, asked)[0].cost


def plan_call(
    account: Account,
    call: OutboundRequest,
    request: RequestTokens | None,
    estimates: TokenEstimates | None,
    asked: Mapping[str, int] | None,
    tag: str = "",
    *,
    strict: bool = False,
) -> list[CallPlan]:
    """Decide what is reserved for a request: the first of these plans for which there is room."""
    if account.fixed_cost is not None and not asked:
        return [CallPlan(account.fixed_cost)]
    provider, estimated = account.provider, account.estimated
    if strict and request is not None and not asked:
        check_bounded(account, call, request)
    cost = dict(provider.cost(endpoint_of(provider, call) if provider.endpoints else None))
    if asked:
        check_asked(account, asked)
        cost |= asked
    if provider.estimate or asked or provider.endpoints:  # else nothing but requests and slots is known
        estimated = tuple(unit for unit in estimated if unit not in cost)
    money = None if provider.prices is None else cost.get(provider.prices.unit)
    if request is None or not (estimated or (request.price is not None and money is None)):
        return [CallPlan(account.fit(cost), money=money or 0, fits=account.can_fit(cost))]
    found = _plan_outputs(account, call, request, estimates, tag, cost, strict=strict, is_asked=bool(asked))
    return [_complete(account, plan, request, estimated, asked, strict=strict) for plan in found]


def _complete(
    account: Account,
    plan: CallPlan,
    request: RequestTokens,
    estimated: tuple[str, ...],
    asked: Mapping[str, int] | None,
    *,
    strict: bool,
) -> CallPlan:
    """Return a plan whose cost, so far what the file or the program says, has what its tokens count, too."""
    provider, cost = account.provider, cast("dict[str, int]", {**cast("Mapping[str, int]", plan.cost)})
    whole = units_of(request, plan.input_tokens, plan.first_output)
    if request.price is not None:
        unit = request.price.unit
        tokens = request.price.estimate(plan.paid_input, plan.output_tokens * request.times)
        whole[unit] = min(MAX_INTEGER, tokens + request.fee)
        plan = plan._replace(money=cost.get(unit, whole[unit]))
    if provider.member and not account.can_fit(cost | {unit: whole.get(unit, 0) for unit in estimated}):
        plan = plan._replace(fits=False)
    for unit in estimated:
        cost[unit] = whole.get(unit, 0) if strict else min(whole.get(unit, 0), account.bursts[unit])
    if not asked:
        return plan._replace(cost=cost)
    counted = {unit: amount for unit, amount in cost.items() if unit in account.units}
    return plan._replace(cost=counted if strict else account.fit(cost))


def check_bounded(account: Account, call: OutboundRequest, request: RequestTokens) -> None:
    """Refuse a strict call if nothing bounds its cost: it uses what is not in it, or its body cannot be read."""
    provider = account.provider
    if not account.estimated and not account.limits_money:
        return
    stated = provider.cost(endpoint_of(provider, call)) if provider.endpoints else {}
    if account.estimated and all(unit in stated for unit in account.estimated) and not provider.ceilings:
        return  # the file says what the endpoint costs
    # A batch has a quota of its own, but costs money.
    if request.unbounded and (request.endpoint.counted or account.limits_money or request.hidden == WEBSOCKET):
        raise unknown_cost(provider, request.unbounded[0])
    if not request.readable:
        raise unreadable_body(provider)
    check_keys(provider, call, request)


def check_keys(provider: Provider, call: OutboundRequest, request: RequestTokens) -> None:
    """Refuse a call if a key in its body is repeated: some providers read the first value, others the last."""
    body = call.body() if request.document else None
    if body and (coding := call.header("content-encoding")):
        body = decoded(body, coding)
    if body and repeats_keys(body, request.document):
        raise repeated_key(provider)


def check_asked(account: Account, asked: Mapping[str, int]) -> None:
    """Refuse a cost in a unit that was meant to be money: it would be counted nowhere."""
    prices = account.provider.prices
    if prices is None:
        return
    for unit in asked:
        if unit not in account.units and unit != prices.unit and (CURRENCY.fullmatch(unit) or MICROS[:-1] in unit):
            raise ConfigError(f"unknown unit {unit!r}: amounts of money are in {prices.unit!r}", field="cost")


def _plan_outputs(
    account: Account,
    call: OutboundRequest,
    request: RequestTokens,
    estimates: TokenEstimates | None,
    tag: str,
    cost: Cost,
    *,
    strict: bool,
    is_asked: bool,
) -> list[CallPlan]:
    """Decide how long the output is assumed to become, and how that is enforced; the caller completes the costs."""
    provider, profile, bound = account.provider, request.profile, request.bound
    key = provider.domain, request.model or "", tag
    expected = input_learned = tokenizer = None
    if estimates is not None:
        learned, tokenizer = estimates
        input_percent = None if tokenizer is not None else STRICT_INPUT_PERCENT if strict else INPUT_PERCENT
        sizes = learned.expect(key, provider.output_reserve.percent, request.text_length, input_percent)
        expected, input_learned = sizes
    input_tokens = request.estimate_input(input_learned, tokenizer)
    if strict and input_learned is not None and not account.can_fit(units_of(request, input_tokens, 1)):
        # Learned from requests of another kind, such as references to files. If it denied calls, none could correct it.
        input_tokens = request.estimate_input()
    if not strict:
        output = bound if expected is None or profile.charges != "usage" else min(request.longest, expected)
        return [CallPlan(cost, request, key, input_tokens, output, output, paid_input=input_tokens)]
    limits_money = request.price is not None and account.limits_money
    paid_input = request.largest_input if limits_money and tokenizer is None else input_tokens
    largest = account.largest_output(request, input_tokens, paid_input)
    most = MAX_INTEGER  # that can count at the same time; more is reserved while it arrives
    if profile.output_counted == "produced" and request.streams and estimates is not None:
        most = most_in_a_period(account.output_limits(request), estimates.learned.fastest(key))
    return [
        CallPlan(cost, request, key, input_tokens, length, min(length, most), lowers, paid_input=paid_input)
        for length, lowers in _strict_lengths(account, call, request, expected, largest, is_asked=is_asked)
    ]


def _strict_lengths(
    account: Account,
    call: OutboundRequest,
    request: RequestTokens,
    expected: int | None,
    largest: int,
    *,
    is_asked: bool,
) -> list[tuple[int, bool]]:
    """Return how long the output of a strict call may become, and whether its bound is lowered to that.

    Of several lengths, the first for which there is room is used. `largest` is what can ever be allowed. The bound of
    the request is not reserved in full where that would cost more than the room: money stays charged if a process is
    killed, and some providers count the bound, however long the output is.
    """
    profile, bound = request.profile, request.bound
    if request.stated and bound <= largest and (expected is None or expected >= bound):
        return [(bound, False)]
    if not call.rewrites or not request.can_be_clamped or has_fixed_body(call):
        if request.document and not request.stated and profile.bounds and not is_asked:
            raise unset_bound(account.provider, request.bound_name)
        # If nothing bounds the output, it may cost whatever the provider's own maximum is.
        unbounded = not request.stated and request.price is not None and request.price.dearest_output > 0
        return [(max(bound, largest) if unbounded else bound, False)]
    usual = bound if expected is None else expected
    if request.stated or profile.charges != "usage":
        usual = min(usual, bound)
    lowered = max(1, min(usual, largest)), True
    limits_money = request.price is not None and account.limits_money
    has_whole = request.stated and bound <= largest and profile.charges == "usage" and not limits_money
    return [(bound, False), lowered] if has_whole else [lowered]


def has_fixed_body(call: OutboundRequest) -> bool:
    """Return whether a request would be invalid with another body, since it is signed (AWS) or encoded."""
    return bool(call.header("content-encoding")) or is_signed(call.header)


def is_signed(header: Callable[[str], str | None]) -> bool:
    """Return whether header fields contain a signature or a digest of the body."""
    signed = (header("authorization") or "").startswith(SIGNATURE_PREFIX)
    return signed or any(header(name) for name in DIGEST_HEADERS)
