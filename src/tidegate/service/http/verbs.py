"""The functions of the verbs in `api.verbs`: each takes a request and returns a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from tidegate.errors import RateLimitError
from tidegate.service.api.decision_json import DecisionWriter
from tidegate.service.api.decoding import REFUSALS, convert_value
from tidegate.service.api.fields import BadFieldError
from tidegate.service.api.requests import PlainAcquireRequest, RequestKey, new_tuple
from tidegate.service.api.responses import (
    DONE,
    AnswerResponse,
    AuditInfo,
    AuditResponse,
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
from tidegate.service.api.verbs import BATCH, VERBS
from tidegate.service.decisions.decider import Subject
from tidegate.service.http.problems import HTTPReply, encode, problem_from

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tidegate.core.decision import Decision
    from tidegate.policy import Key
    from tidegate.service.api.requests import (
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
    from tidegate.service.decisions.audit import Origin
    from tidegate.service.decisions.decider import Decider
    from tidegate.service.decisions.idempotency import KeyedCall

    Function = Callable[..., Coroutine[Any, Any, HTTPReply]]

decode_plain_acquire: Final = msgspec.json.Decoder(PlainAcquireRequest).decode


class Verbs:
    """All verbs of one Decider."""

    def __init__(self, decider: Decider) -> None:
        """Use this decider."""
        self.decider = decider
        self.all: dict[str, Function] = {name: _encode_response(getattr(self, name)) for name in VERBS}
        self._writer = DecisionWriter()
        # Functions of a body that need no coroutine. They return None, and do nothing, if a request needs more.
        self.immediate: dict[str, Callable[[bytes], bytes | None]] = {
            "acquire": self._acquire_now,
            "batch": self._batch_now,
        }

    def _acquire_now(self, body: bytes) -> bytes | None:
        """Run an acquire with only a policy and a key, on a store in memory."""
        try:
            request = decode_plain_acquire(body)
        except REFUSALS:
            return None  # not such a request, or an invalid one
        fast_path = self.decider.fast_path(request.policy)
        return None if fast_path is None else self._writer.write(fast_path.decide(request.key))

    def _batch_now(self, body: bytes) -> bytes | None:
        """Run a batch of such asks, or of keys of such a policy."""
        request: BatchRequest = BATCH.decode(body)
        if request.asks is not UNSET:
            if not all([ask.key.__class__ is str and ask.cost == 1 for ask in request.asks]):  # noqa: C419 - faster as a list
                return None
            policies, keys = [ask.policy for ask in request.asks], [ask.key for ask in request.asks]
            results = self.decider.decide_now(policies, keys)  # type: ignore[arg-type]  # an ask with a key has a policy
            return None if results is None else self._write_batch(results, "asks")
        fast_path = self.decider.fast_path(request.policy)  # type: ignore[arg-type]  # a batch of keys has a policy
        decisions = None if fast_path is None else fast_path.decide_all(request.keys)  # type: ignore[arg-type]  # as above
        return None if decisions is None else self._writer.write_batch(decisions)

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

    # ---- batches -----------------------------------------------------------------------------------------------------

    async def batch(self, request: BatchRequest, call: KeyedCall | None = None) -> bytes:
        """Decide on many asks: keys of one policy with a cost of 1 each, or asks with a subject and cost each.

        Returns the JSON of a BatchResponse.
        """
        policy, keys, asks = request.policy, request.keys, request.asks
        if asks is not UNSET:
            return self._write_batch(await self.decider.batch([(ask.subject, ask.cost) for ask in asks], call), "asks")
        if policy is UNSET or keys is UNSET:  # pragma: no cover - the request was checked
            raise BadFieldError("/asks", "missing")
        return self._write_batch(await self._batch_keys(policy, keys, call), "keys")

    def _write_batch(self, results: Sequence[Decision | RateLimitError | None], name: str) -> bytes:
        """Write the results of a batch: each is a decision or an error."""
        return self._writer.write_batch([
            _error_answer(each, name, number) if isinstance(each, RateLimitError) else each
            for number, each in enumerate(results)
        ])  # fmt: skip

    async def _batch_keys(
        self, policy: str, keys: list[Any], call: KeyedCall | None
    ) -> list[Decision | RateLimitError | None]:
        """Decide on keys of one policy; an invalid key gets its error as its result."""
        subjects, errors = [], {}
        for number, key in enumerate(keys):
            try:
                subjects.append((_subject(policy, key), 1))
            except BadFieldError as error:
                errors[number] = error
        results = await self.decider.batch(subjects, call)
        for number, invalid in errors.items():
            results.insert(number, invalid)
        return results


def as_json_key(key: Key) -> str | list[str]:
    """Return a key as JSON has it."""
    return key if isinstance(key, str) else list(key)


def _encode_response(function: Callable[..., Coroutine[Any, Any, object]]) -> Function:
    """Return the function of a verb whose response is encoded, unless it is JSON already."""

    async def run(*request: object) -> HTTPReply:
        response = await function(*request)
        return HTTPReply(200, response if isinstance(response, bytes) else encode(response))

    return run


def _subject(policy: str, key: object) -> Subject:
    """Return the subject of one of the keys of a batch."""
    if key.__class__ is str:
        return new_tuple(Subject, (policy, key, "", (), ""))  # half the cost of Subject(policy, key)
    parts = convert_value(key, RequestKey, "/key")
    return Subject(policy, tuple(parts) if len(parts) > 1 else parts[0])


def _error_answer(error: RateLimitError, name: str, number: int) -> AnswerResponse:
    """Return the error of one item of `asks` or `keys`; its pointer is the place in the batch."""
    problem = problem_from(error)
    if problem.pointer is not None:
        problem.pointer = f"/{name}/{number}{problem.pointer if name == 'asks' else ''}"
    return AnswerResponse(error=problem.response)
