"""ShouldRateLimit: Envoy asks about a request's descriptors, and is told whether to let it pass.

All descriptors of a request are decided together: if one is over its limit, none is charged. Where the store cannot be
asked and the policy says `deny`, the answer is UNAVAILABLE, so that Envoy's own failure mode decides.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable
from tidegate.headers import PROBLEM_TYPE, Style, problem, write
from tidegate.service.decisions.descriptors import ENVOY_UNITS, UNIT_PERIODS, request_policy
from tidegate.service.decisions.policy_limiters import bound_key
from tidegate.service.envoy.messages import CODE_OK, CODE_OVER_LIMIT, METHOD, SERVICE, classes, read_request

try:
    import grpc  # type: ignore[import-untyped]  # it has no types
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the service for Envoy needs grpcio: pip install 'tidegate[service]'") from error

if TYPE_CHECKING:
    from tidegate.core import Limit
    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy
    from tidegate.service.config.settings import Settings
    from tidegate.service.decisions.decider import Decider
    from tidegate.service.decisions.descriptors import DescriptorNode

log = logging.getLogger("tidegate.service")

MAX_UINT32: Final = 2**32 - 1
MAX_DESCRIPTORS: Final = 100  # descriptors of a request
PROBLEMS: Final = (
    (StoreUnavailable, "store-unavailable", grpc.StatusCode.UNAVAILABLE),
    (ConfigError, "bad-field", grpc.StatusCode.INVALID_ARGUMENT),
    (RateLimitError, "stopping", grpc.StatusCode.UNAVAILABLE),
)
UNIT_OF: Final = {
    period: number for number, name in enumerate(ENVOY_UNITS) if (period := UNIT_PERIODS.get(name)) is not None
}


class DescriptorAsk(NamedTuple):
    """One descriptor: by which policy it is decided, as which key, at which cost. Without a policy: not limited."""

    policy: Policy | None
    key: Key = ""
    cost: int = 1
    look: bool = False  # a cost of 0 only looks whether the limit is used up


class RateLimitService:
    """Answers ShouldRateLimit from a decider."""

    def __init__(self, decider: Decider, style: str = "x") -> None:
        """Answer by this decider, with header fields of this style."""
        self.decider = decider
        self._style = cast("Style", style)
        self._messages = classes()

    def handler(self) -> Any:  # noqa: ANN401 - gRPC has no types
        """Give what a gRPC server registers."""
        method = grpc.unary_unary_rpc_method_handler(
            self.should_rate_limit,  # which reads the request itself: gRPC would tell the client of our classes
            response_serializer=self._messages["RateLimitResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    async def should_rate_limit(self, sent: bytes, context: Any) -> Any:  # noqa: ANN401 - gRPC has no types
        """Answer one request. Whatever goes wrong is a status; what was not foreseen is told to the log alone."""
        try:
            return await self._answer(read_request(sent))
        except RateLimitError as error:
            kind, code = next(found for each, *found in PROBLEMS if isinstance(error, each))
            detail = str(error)
        except Exception:
            log.exception("a request of Envoy failed")
            kind, code, detail = "internal", grpc.StatusCode.INTERNAL, "see the log of the service"
        self.decider.stats.errors[kind] += 1
        return await context.abort(code, detail)

    async def _answer(self, request: Any) -> Any:  # noqa: ANN401 - made at run time
        if not request.domain:
            raise ConfigError("must not be empty", field="domain")
        if not 1 <= len(request.descriptors) <= MAX_DESCRIPTORS:
            raise ConfigError(f"must be 1 to {MAX_DESCRIPTORS}, not {len(request.descriptors)}", field="descriptors")
        domain = self.decider.policies.domains.get(request.domain)
        if domain is None:  # not limited, whatever limits the request brings: what is kept of it would have no bound
            return self._response([None] * len(request.descriptors))
        found = [domain.find(pairs_of(each)) for each in request.descriptors]
        replaced = {name for each in found if each is not None for name in each[0].replaces}
        each = zip(request.descriptors, found, strict=True)
        asked = [self._asked(request, descriptor, place, replaced) for descriptor, place in each]
        decisions = await self._decide(asked)
        return self._response(decisions)

    def _asked(
        self,
        request: Any,  # noqa: ANN401 - made at run time
        descriptor: Any,  # noqa: ANN401 - made at run time
        found: tuple[DescriptorNode, Key] | None,
        replaced: set[str],
    ) -> DescriptorAsk:
        cost = int(request.hits_addend) or 1
        look = False
        if descriptor.HasField("hits_addend"):
            cost = int(descriptor.hits_addend.value)
            look = not cost
        node = None if found is None else found[0]
        policy = None if node is None or node.name in replaced else node.policy
        if descriptor.HasField("limit") and descriptor.limit.requests_per_unit:
            unit = descriptor.limit.unit
            if not 1 <= unit < len(ENVOY_UNITS):
                raise ConfigError(f"unknown unit {unit}", field="limit.unit")
            policy = request_policy(request.domain, node, descriptor.limit.requests_per_unit, ENVOY_UNITS[unit])
        pairs = pairs_of(descriptor)
        key: Key = found[1] if found is not None else (request.domain, *(part for pair in pairs for part in pair))
        return DescriptorAsk(policy, bound_key(key), max(1, cost), look)

    async def _decide(self, asked: list[DescriptorAsk]) -> list[Decision | None]:
        """Decide on those that are limited, all or nothing; look at those that only look."""
        answers: list[Decision | None] = [None] * len(asked)
        for number, each in enumerate(asked):
            if each.policy is not None and each.look:
                answers[number] = await self.decider.peek_policy(each.policy, each.key)
        if any(answer is not None and not answer.allowed for answer in answers):
            looks = [n for n, each in enumerate(asked) if each.policy is not None and not each.look]
            for number in looks:  # the request is refused already: charge nothing
                policy = asked[number].policy
                answers[number] = None if policy is None else await self.decider.peek_policy(policy, asked[number].key)
            return answers
        charged = [(n, each.policy, each.key, each.cost) for n, each in enumerate(asked) if not each.look]
        limited = [(n, policy, key, cost) for n, policy, key, cost in charged if policy is not None]
        decisions = await self.decider.decide_all([(policy, key, cost) for _, policy, key, cost in limited])
        for (number, *_), decision in zip(limited, decisions, strict=True):
            answers[number] = decision
        return answers

    # ---- the answer --------------------------------------------------------------------------------------------------

    def _response(self, decisions: list[Decision | None]) -> Any:  # noqa: ANN401 - made at run time
        response = self._messages["RateLimitResponse"](overall_code=CODE_OK)
        worst: Decision | None = None
        for decision in decisions:
            over = decision is not None and is_over(decision)
            status = response.statuses.add(code=CODE_OVER_LIMIT if over else CODE_OK)
            if decision is None:
                continue
            self._describe(status, decision)
            if over:
                response.overall_code = CODE_OVER_LIMIT
            if worst is None or (over, -decision.remaining) > (is_over(worst), -worst.remaining):
                worst = decision
        if worst is not None:
            for name, value in write(worst, self._style):
                if name != "Retry-After" or response.overall_code == CODE_OVER_LIMIT:
                    response.response_headers_to_add.add(key=name.lower(), value=value)
        if worst is not None and response.overall_code == CODE_OVER_LIMIT:
            response.response_headers_to_add.add(key="content-type", value=PROBLEM_TYPE)
            response.raw_body = json.dumps(problem(worst)).encode()
        return response

    def _describe(self, status: Any, decision: Decision) -> None:  # noqa: ANN401 - made at run time
        """Tell of the tightest limit of a descriptor."""
        views = decision.views
        number = min(range(len(views)), key=lambda n: (views[n][1] == 0, views[n][0]))
        limit, (remaining, _, reset) = decision[2][number], views[number]
        status.current_limit.requests_per_unit = min(MAX_UINT32, limit.quota)
        status.current_limit.unit = unit_of(limit)
        status.current_limit.name = limit.name
        status.limit_remaining = min(MAX_UINT32, remaining)
        status.duration_until_reset.seconds = reset // SECOND
        status.duration_until_reset.nanos = reset % SECOND * 1000


def pairs_of(descriptor: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401 - made at run time
    """Read a descriptor's keys and values."""
    return tuple((entry.key, entry.value) for entry in descriptor.entries)


def is_over(decision: Decision) -> bool:
    """Tell whether this descriptor itself is over its limit; of several, others may share its refusal."""
    return not decision.allowed and decision.retry != 0


def unit_of(limit: Limit) -> int:
    """Find Envoy's unit of a limit's period; 0: it has none."""
    return UNIT_OF.get(str(limit.period), 0)


async def serve(decider: Decider, settings: Settings) -> Any:  # noqa: ANN401 - gRPC has no types
    """Start a gRPC server; gives it, to be stopped."""
    if settings.grpc is None:
        raise ConfigError("needs an address such as 127.0.0.1:8081", field="grpc")
    options = (
        ("grpc.so_reuseport", 1 if settings.workers > 1 else 0),
        ("grpc.max_receive_message_length", 2**20),
        # As for HTTP: silent and idle connections are closed, and there are no more than descriptors.
        ("grpc.server_handshake_timeout_ms", round(settings.read_timeout * 1000)),
        ("grpc.max_connection_idle_ms", round(settings.idle_timeout * 1000)),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
    )
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=settings.max_concurrency)
    server.add_generic_rpc_handlers((RateLimitService(decider, settings.headers).handler(),))
    try:
        bound = server.add_insecure_port(str(settings.grpc))
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"cannot listen on {settings.grpc}: is another program there?", field="grpc")
    await server.start()
    return server
