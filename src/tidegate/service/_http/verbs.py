"""The functions of the verbs in `api.verbs`: each takes a request and returns a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from tidegate.core._decision import Decision
from tidegate.errors import RateLimitError
from tidegate.service._api.decoding import convert_value
from tidegate.service._api.fields import BadFieldError
from tidegate.service._api.problems import encode, problem_from
from tidegate.service._api.requests import RequestKey
from tidegate.service._api.responses import (
    DONE,
    AnswerResponse,
    AuditInfo,
    AuditResponse,
    BatchResponse,
    BlockInfo,
    BlockResponse,
    BlocksResponse,
    DecisionResponse,
    DoneResponse,
    LeaseResponse,
    PoliciesInfo,
    ReserveResponse,
    UsageResponse,
    decision_fields,
    decision_response,
    usage_response,
)
from tidegate.service._api.verbs import VERBS
from tidegate.service._decisions.policy_limiters import ASK_STORE, Subject, new_tuple
from tidegate.service._http.runs import ServiceRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate._policy import Cost, Key
    from tidegate.service._api.requests import (
        AcquireRequest,
        AuditedRequest,
        BatchRequest,
        BlockRequest,
        CancelRequest,
        CommitRequest,
        CostRequest,
        LeaseRequest,
        PeekRequest,
        ReserveRequest,
        TargetRequest,
    )
    from tidegate.service._api.run_requests import (
        RunChargeRequest,
        RunChargeResponse,
        RunChildRequest,
        RunCreateRequest,
        RunCreateResponse,
        RunExtendRequest,
        RunListResponse,
        RunOwnerRequest,
        RunReadRequest,
        RunReadResponse,
        RunReportResponse,
        RunStopRequest,
    )
    from tidegate.service._decisions.audit import Origin
    from tidegate.service._decisions.decider import Decider
    from tidegate.service._decisions.idempotency import KeyedCall

    Function = Callable[..., Coroutine[Any, Any, object]]


class Verbs:
    """All verbs of one Decider."""

    def __init__(self, decider: Decider) -> None:
        """Use this decider."""
        self.decider = decider
        self.store_runs: ServiceRuns = ServiceRuns(decider.store, decider.secrets)
        self._functions: dict[str, Function] = {name: getattr(self, name) for name in VERBS}
        # The verbs that may be decided without a coroutine. None: nothing was done, because that needs the store.
        self.immediate: dict[str, Callable[[Any], bytes | None]] = {
            "acquire": self._acquire_now,
            "batch": self._batch_now,
        }

    async def run(self, name: str, *request: object) -> bytes:
        """Run a verb; return the JSON of its response."""
        return encode(await self._functions[name](*request))

    def _acquire_now(self, request: AcquireRequest) -> bytes | None:
        """Run an acquire for a key of a policy that does not wait."""
        key, cost = request.key, request.cost
        if key.__class__ is not str or request.timeout or request.priority:
            return None
        decision: Any = self.decider.acquire_now(request.policy, key, 1 if cost is UNSET else cost)  # type: ignore[arg-type]  # a request with a key has a policy
        return None if decision is ASK_STORE else encode(decision_response(decision))

    def _batch_now(self, request: BatchRequest) -> bytes | None:
        """Run a batch of keys of policies."""
        policy, keys, asks = request.policy, request.keys, request.asks
        if asks:
            keys = [ask.key for ask in asks]
            policies, costs = [ask.policy for ask in asks], [ask.cost for ask in asks]
        else:
            policies, costs = [policy] * len(keys), [1] * len(keys)  # type: ignore[arg-type]  # a batch has asks or keys
        if not all([key.__class__ is str for key in keys]):  # type: ignore[union-attr]  # noqa: C419 - as above; faster as a list
            return None
        results: Any = self.decider.batch_now(policies, keys, costs)  # type: ignore[arg-type]  # as above
        return None if results is ASK_STORE else encode(self._batch_response(request, results, {}))

    async def acquire(self, request: AcquireRequest, call: KeyedCall | None = None) -> DecisionResponse:
        """Take permits, waiting if requested."""
        if request.provider is not UNSET:
            return await self._acquire_provider(request.provider, request)
        decision = await self.decider.acquire(
            request.subject, request.permits, request.wait_seconds, request.priority, call
        )
        return decision_response(decision)

    async def _acquire_provider(
        self, target: str, request: AcquireRequest | ReserveRequest, ttl: float | None = None
    ) -> ReserveResponse:
        """Take permits of a provider; the response has the id that settles them."""
        result = await self.decider.acquire_provider(
            target, request.provider_permits, request.wait_seconds, request.priority, ttl
        )
        member = result.member or UNSET
        return ReserveResponse(*decision_fields(result.decision), result.id, member)  # type: ignore[arg-type, call-arg]  # in the order of the fields

    async def peek(self, request: PeekRequest) -> DecisionResponse:
        """Return the decision that acquire would return."""
        if request.provider is not UNSET:
            decision = await self.decider.provider_permits.peek(request.provider, request.provider_permits)
        else:
            decision = await self.decider.peek(request.subject, request.permits)
        return decision_response(decision)

    async def reserve(self, request: ReserveRequest, call: KeyedCall | None = None) -> ReserveResponse:
        """Charge an estimate."""
        if request.provider is not UNSET:
            return await self._acquire_provider(request.provider, request, request.ttl)
        result = await self.decider.reserve(
            request.subject, request.permits, request.ttl, request.wait_seconds, request.priority, call
        )
        return ReserveResponse(*decision_fields(result.decision), result.id)  # type: ignore[arg-type, call-arg]  # in the order of the fields

    async def lease(self, request: LeaseRequest, call: KeyedCall | None = None) -> LeaseResponse:
        """Take permits in advance."""
        lease = await self.decider.lease(request.subject, request.cost, request.max_permits, request.ttl, call)
        return LeaseResponse(*decision_fields(lease.decision), lease.id, lease.permits, lease.seconds, lease.decay)  # type: ignore[arg-type, call-arg]  # as above

    async def commit(self, request: CommitRequest, call: KeyedCall | None = None) -> DoneResponse:
        """Settle a reservation with its actual cost."""
        await self.decider.commit(request.id, request.cost, call)
        return DONE

    async def cancel(self, request: CancelRequest, call: KeyedCall | None = None) -> DoneResponse:
        """Cancel a reservation."""
        await self.decider.cancel(request.id, call)
        return DONE

    async def release(self, request: CostRequest, call: KeyedCall | None = None) -> DoneResponse:
        """Release slots."""
        await self.decider.release(request.subject, request.cost, call)
        return DONE

    async def usage(self, request: TargetRequest) -> UsageResponse:
        """Return how much a key has used."""
        if request.provider is not UNSET:
            return usage_response(await self.decider.provider_permits.usage(request.provider))
        return usage_response(await self.decider.usage(request.subject))

    async def refund(self, request: CostRequest, call: KeyedCall | None = None) -> DoneResponse:
        """Refund permits."""
        await self.decider.refund(request.subject, request.cost, call)
        return DONE

    async def reset(self, request: AuditedRequest, origin: Origin) -> DoneResponse:
        """Delete the state of a key."""
        await self.decider.reset(request.subject, origin)
        return DONE

    async def block(self, request: BlockRequest, origin: Origin) -> BlockResponse:
        """Deny a key for some time."""
        return BlockResponse(ok=True, seconds=await self.decider.block(request.subject, request.seconds, origin))

    async def unblock(self, request: AuditedRequest, origin: Origin) -> DoneResponse:
        """Remove the block of a key."""
        await self.decider.unblock(request.subject, origin)
        return DONE

    async def blocks(self) -> BlocksResponse:
        """List the blocks."""
        return BlocksResponse([
            BlockInfo(policy=policy, key=as_json_key(key), seconds=seconds)
            for policy, key, seconds in await self.decider.find_blocks()
        ])  # fmt: skip

    async def audit(self) -> AuditResponse:
        """List the latest entries of the audit log."""
        entries = (entry._asdict() for entry in await self.decider.audit.read())
        return AuditResponse([AuditInfo(**{**each, "key": as_json_key(each["key"])}) for each in entries])  # type: ignore[typeddict-item]  # the same fields

    async def policies(self) -> PoliciesInfo:
        """List the policies."""
        return {"policies": self.decider.describe_policies(), "domains": sorted(self.decider.policies.domains)}  # type: ignore[typeddict-item]  # a Decider is independent of the protocol

    # ---- runs --------------------------------------------------------------------------------------------------------

    async def runs(self) -> RunListResponse:
        """List the runs of the store."""
        return await self.store_runs.list()

    async def runs_create(self, request: RunCreateRequest) -> RunCreateResponse:
        """Create a run."""
        return await self.store_runs.create(request)

    async def runs_child(self, request: RunChildRequest) -> RunCreateResponse:
        """Create a node below another one."""
        return await self.store_runs.child(request)

    async def runs_charge(self, request: RunChargeRequest) -> RunChargeResponse:
        """Charge a node and all nodes above it."""
        return await self.store_runs.charge(request)

    async def runs_read(self, request: RunReadRequest) -> RunReadResponse:
        """Return what a node and those below it have used."""
        return await self.store_runs.read(request)

    async def runs_report(self, request: RunReadRequest) -> RunReportResponse:
        """Return what was used, for each node, tool and model."""
        return await self.store_runs.report(request)

    async def runs_extend(self, request: RunExtendRequest) -> DoneResponse:
        """Add to the quotas of a node, or move its end."""
        return await self.store_runs.extend(request)

    async def runs_stop(self, request: RunStopRequest) -> DoneResponse:
        """Deny every later call of a node and of those below it."""
        return await self.store_runs.stop(request)

    async def runs_close(self, request: RunOwnerRequest) -> DoneResponse:
        """End a node."""
        return await self.store_runs.close(request)

    # ---- batches -----------------------------------------------------------------------------------------------------

    async def batch(self, request: BatchRequest, call: KeyedCall | None = None) -> BatchResponse:
        """Decide on many asks: keys of one policy with a cost of 1 each, or asks with a subject and cost each."""
        asks, errors = self._read_asks(request)
        return self._batch_response(request, await self.decider.batch(asks, call), errors)

    @staticmethod
    def _read_asks(request: BatchRequest) -> tuple[list[tuple[Subject, Cost]], dict[int, RateLimitError]]:
        """Return the asks of a batch, and the errors of invalid keys by their place among the results."""
        if request.asks is not UNSET:
            return [(ask.subject, ask.cost) for ask in request.asks], {}
        asks: list[tuple[Subject, Cost]] = []
        errors: dict[int, RateLimitError] = {}
        policy = request.policy
        for number, key in enumerate(request.keys):  # type: ignore[arg-type]  # a batch has asks or keys
            if key.__class__ is str:
                asks.append((new_tuple(Subject, (policy, key, "", (), "")), 1))
                continue
            try:
                parts = convert_value(key, RequestKey, "/key")
            except BadFieldError as error:
                errors[number] = error
            else:
                asks.append((Subject(policy, tuple(parts) if len(parts) > 1 else parts[0]), 1))  # type: ignore[arg-type]  # as above
        return asks, errors

    @staticmethod
    def _batch_response(request: BatchRequest, results: list[Any], errors: dict[int, RateLimitError]) -> BatchResponse:
        for number, error in errors.items():
            results.insert(number, error)
        name = "asks" if request.asks is not UNSET else "keys"
        answers: list[Any] = [
            decision_response(each)
            if each.__class__ is Decision or not isinstance(each, RateLimitError)
            else _error_answer(each, name, number)
            for number, each in enumerate(results)
        ]
        return BatchResponse(answers)


def as_json_key(key: Key) -> str | list[str]:
    """Return a key as JSON has it."""
    return key if isinstance(key, str) else list(key)


def _error_answer(error: RateLimitError, name: str, number: int) -> AnswerResponse:
    """Return the error of one item of `asks` or `keys`; its pointer is the place in the batch."""
    problem = problem_from(error)
    if problem.pointer is not None:
        problem.pointer = f"/{name}/{number}{problem.pointer if name == 'asks' else ''}"
    return AnswerResponse(error=problem.response)
