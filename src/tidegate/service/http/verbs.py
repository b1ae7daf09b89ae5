"""The functions of the verbs in `api.verbs`: each takes the parameters of a request and returns an HTTPReply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.service.api.fields import BadFieldError, BatchRequest, RequestFields
from tidegate.service.api.verbs import ASK, VERBS
from tidegate.service.decisions.blocks import DEFAULT_BLOCK_SECONDS
from tidegate.service.http.json_protocol import DECODER, DecisionWriter, describe, describe_usage
from tidegate.service.http.problems import HTTPReply, ProblemError, problem_from

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.core.decision import Decision
    from tidegate.policy import Cost
    from tidegate.service.api.verbs import RequestType
    from tidegate.service.decisions.decider import Decider, Subject
    from tidegate.service.decisions.idempotency import KeyedCall

    Function = Callable[..., Coroutine[Any, Any, HTTPReply]]

DONE: Final = HTTPReply(200, b'{"ok":true}')


class Verbs:
    """All verbs of one Decider."""

    def __init__(self, decider: Decider) -> None:
        """Use this decider."""
        self.decider = decider
        self._write = DecisionWriter().write
        self.all: dict[str, Function] = {
            verb.name: _read_first(verb.request, getattr(self, verb.name)) for verb in VERBS.values()
        }

    def fast_acquire(self, body: bytes) -> HTTPReply | None:
        """Run an acquire with only a policy and a key, on a store in memory; None for any other request."""
        try:
            text = body.decode()
            data, end = DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None  # the regular path reports what is wrong
        if end != len(text) or data.__class__ is not dict or len(data) != 2:  # noqa: PLR2004 - a policy and a key
            return None
        policy, key = data.get("policy"), data.get("key")
        if policy.__class__ is not str or key.__class__ is not str:
            return None
        fast_path = self.decider.fast_path(policy)
        return None if fast_path is None else HTTPReply(200, self._write(fast_path(key)).encode())

    async def acquire(
        self,
        subject: Subject,
        cost: Cost | None = None,
        timeout: float = 0.0,  # noqa: ASYNC109 - a field of the request
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> HTTPReply:
        """Take permits, waiting if requested."""
        if subject.provider:
            return await self._acquire_provider(subject.provider, cost, timeout, priority)
        decision = await self.decider.acquire(subject, 1 if cost is None else cost, timeout, priority, call)
        return HTTPReply(200, self._write(decision).encode())

    async def _acquire_provider(
        self,
        target: str,
        cost: Cost | None,
        timeout: float,  # noqa: ASYNC109 - as above
        priority: float,
        ttl: float | None = None,
    ) -> HTTPReply:
        """Take permits of a provider; the reply has the id that settles them."""
        result = await self.decider.acquire_provider(target, cost, timeout, priority, ttl)
        return self._decision_reply(result.decision, id=result.id)

    async def peek(self, subject: Subject, cost: Cost | None = None) -> HTTPReply:
        """Return the decision that acquire would return."""
        if subject.provider:
            decision = await self.decider.provider_permits.peek(subject.provider, cost)
        else:
            decision = await self.decider.peek(subject, 1 if cost is None else cost)
        return HTTPReply(200, self._write(decision).encode())

    async def reserve(
        self,
        subject: Subject,
        cost: Cost | None = None,
        ttl: float = 60.0,
        timeout: float = 0.0,  # noqa: ASYNC109 - a field of the request
        priority: float = 0.0,
        call: KeyedCall | None = None,
    ) -> HTTPReply:
        """Charge an estimate."""
        if subject.provider:
            return await self._acquire_provider(subject.provider, cost, timeout, priority, ttl)
        result = await self.decider.reserve(subject, 1 if cost is None else cost, ttl, timeout, priority, call)
        return self._decision_reply(result.decision, id=result.id)

    async def lease(
        self, subject: Subject, cost: Cost = 1, most: int = 1, ttl: float = 1.0, call: KeyedCall | None = None
    ) -> HTTPReply:
        """Take permits in advance."""
        lease = await self.decider.lease(subject, cost, most, ttl, call)
        terms = {"permits": lease.permits, "seconds": lease.seconds, "decay": lease.decay}
        return self._decision_reply(lease.decision, id=lease.id, **terms)

    def _decision_reply(self, decision: Decision | None, **more: object) -> HTTPReply:
        described = json.loads(self._write(None)) if decision is None else describe(decision)
        return HTTPReply(200, json.dumps({**described, **more}, separators=(",", ":")).encode())

    async def commit(self, id: str, cost: Cost | None = None, call: KeyedCall | None = None) -> HTTPReply:  # noqa: A002 - a field of the request
        """Settle a reservation with its actual cost."""
        await self.decider.commit(id, cost, call)
        return DONE

    async def cancel(self, id: str, call: KeyedCall | None = None) -> HTTPReply:  # noqa: A002 - as above
        """Cancel a reservation."""
        await self.decider.cancel(id, call)
        return DONE

    async def release(self, subject: Subject, cost: Cost = 1, call: KeyedCall | None = None) -> HTTPReply:
        """Release slots."""
        await self.decider.release(subject, cost, call)
        return DONE

    async def usage(self, subject: Subject) -> HTTPReply:
        """Return how much a key has used."""
        if subject.provider:
            usage = await self.decider.provider_permits.usage(subject.provider)
        else:
            usage = await self.decider.usage(subject)
        return HTTPReply(200, json.dumps(describe_usage(usage)).encode())

    async def refund(self, subject: Subject, cost: Cost = 1, call: KeyedCall | None = None) -> HTTPReply:
        """Give permits back."""
        await self.decider.refund(subject, cost, call)
        return DONE

    async def reset(self, subject: Subject) -> HTTPReply:
        """Delete the state of a key."""
        await self.decider.reset(subject)
        return DONE

    async def block(self, subject: Subject, seconds: float = DEFAULT_BLOCK_SECONDS) -> HTTPReply:
        """Deny a key for a while."""
        stored = await self.decider.block(subject, seconds)
        return HTTPReply(200, json.dumps({"ok": True, "seconds": stored}).encode())

    async def unblock(self, subject: Subject) -> HTTPReply:
        """Remove the block of a key."""
        await self.decider.unblock(subject)
        return DONE

    async def blocks(self) -> HTTPReply:
        """List the blocks."""
        blocks = [
            {"policy": policy, "key": key if isinstance(key, str) else list(key), "seconds": seconds}
            for policy, key, seconds in self.decider.blocked()
        ]
        return HTTPReply(200, json.dumps({"blocks": blocks}).encode())

    async def policies(self) -> HTTPReply:
        """List the policies."""
        described = {"policies": self.decider.describe_policies(), "domains": sorted(self.decider.policies.domains)}
        return HTTPReply(200, json.dumps(described).encode())

    # ---- batches -----------------------------------------------------------------------------------------------------

    async def batch(self, batch: BatchRequest, call: KeyedCall | None = None) -> HTTPReply:
        """Decide on many asks: keys of one policy with a cost of 1 each, or asks with a subject and cost each."""
        policy, keys, asks = batch
        if asks is not None:
            return await self._batch_asks(asks, call)
        fast_path = self.decider.fast_path(policy)
        if fast_path is None:
            return self._batch_reply(await self._batch_keys(policy, keys, call))
        return self._run_fast_paths([(fast_path, key) for key in keys], "keys")

    async def _batch_keys(
        self, policy: str, keys: list[Any], call: KeyedCall | None
    ) -> list[Decision | RateLimitError | None]:
        """Decide on keys of one policy; an invalid key gets its error as its result."""
        subjects, errors = [], {}
        for number, key in enumerate(keys):
            try:
                subjects.append((_subject(policy, key, number), 1))
            except BadFieldError as error:
                errors[number] = error
        results = await self.decider.batch(subjects, call)
        for number, invalid in errors.items():
            results.insert(number, invalid)
        return results

    def _run_fast_paths(self, asks: list[tuple[Callable[[Any], Decision], Any]], name: str) -> HTTPReply:
        """Decide on asks that all have a fast path."""
        write, results = self._write, []
        for number, (fast_path, key) in enumerate(asks):
            try:
                results.append(write(fast_path(key)))
            except RateLimitError as error:
                results.append(_error_json(_key_error(key) or error, f"/{name}/{number}"))
        return HTTPReply(200, f'{{"answers":[{",".join(results)}]}}'.encode())

    def _find_fast_paths(self, asks: list[Any]) -> list[tuple[Callable[[Any], Decision], Any]] | None:
        """Return the fast path of each ask; None if an ask has more than a policy and a key, or has no fast path."""
        found = []
        for ask in asks:
            if ask.__class__ is not dict or len(ask) != 2:  # noqa: PLR2004 - a policy and a key
                return None
            policy, key = ask.get("policy"), ask.get("key")
            if policy.__class__ is not str or key.__class__ is not str:
                return None
            fast_path = self.decider.fast_path(policy)
            if fast_path is None:
                return None
            found.append((fast_path, key))
        return found

    async def _batch_asks(self, asks: list[object], call: KeyedCall | None) -> HTTPReply:
        """Read all asks before the first is decided: an invalid batch charges nothing."""
        fast_paths = self._find_fast_paths(asks)
        if fast_paths is not None:
            return self._run_fast_paths(fast_paths, "asks")
        subjects = []
        for number, ask in enumerate(asks):
            parameters = ASK.read(ask, f"/asks/{number}")
            subjects.append((parameters["subject"], parameters.get("cost", 1)))
        return self._batch_reply(await self.decider.batch(subjects, call))

    def _batch_reply(self, results: list[Decision | RateLimitError | None]) -> HTTPReply:
        texts = [_error_json(each) if isinstance(each, RateLimitError) else self._write(each) for each in results]
        return HTTPReply(200, f'{{"answers":[{",".join(texts)}]}}'.encode())


def _read_first(request: RequestType | None, function: Function) -> Function:
    """Return a function that reads the JSON value of a request and passes its parameters to the function of a verb."""
    if request is None:
        return function
    read = request.read

    def run(data: object, call: KeyedCall | None = None) -> Coroutine[Any, Any, HTTPReply]:
        parameters = read(data)
        return function(**parameters) if call is None else function(**parameters, call=call)

    return run


def _subject(policy: str, key: object, number: int) -> Subject:
    try:
        return RequestFields({"policy": policy, "key": key}).subject()
    except BadFieldError as error:
        raise BadFieldError(f"/keys/{number}", error.detail) from None


def _key_error(key: object) -> BadFieldError | None:
    """Return the error about a key of a wrong JSON type; the error of a limiter describes Python types."""
    try:
        _subject("", key, 0)
    except BadFieldError as error:
        return error
    return None


def _error_json(error: RateLimitError, pointer: str | None = None) -> str:
    """Write the error of one ask as JSON."""
    problem: ProblemError = problem_from(error)
    if pointer is not None:
        problem.pointer = pointer
    return f'{{"error":{problem.reply().body.decode()}}}'
