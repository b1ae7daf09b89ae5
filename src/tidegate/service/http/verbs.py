"""The verbs as JSON over HTTP: each takes the JSON value of a request and returns an HTTPReply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.service.decisions.blocks import DEFAULT_BLOCK_SECONDS
from tidegate.service.decisions.decider import MAX_BATCH, Subject
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS
from tidegate.service.http.json_protocol import (
    ASK_FIELDS,
    DECODER,
    VERB_FIELDS,
    BadFieldError,
    DecisionWriter,
    RequestFields,
    describe,
    describe_usage,
    type_name,
)
from tidegate.service.http.problems import HTTPReply, ProblemError, problem_from

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.core.decision import Decision
    from tidegate.service.decisions.decider import Decider
    from tidegate.service.decisions.idempotency import KeyedCall

    Verb = Callable[..., Coroutine[Any, Any, HTTPReply]]  # takes a body and, if the verb is idempotent, a KeyedCall

DONE: Final = HTTPReply(200, b'{"ok":true}')


class Verbs:
    """All verbs of one Decider."""

    def __init__(self, decider: Decider) -> None:
        """Use this decider."""
        self.decider = decider
        self._write = DecisionWriter().write
        self.all: dict[str, Verb] = {
            "acquire": self.acquire,
            "peek": self.peek,
            "reserve": self.reserve,
            "lease": self.lease,
            "commit": self.commit,
            "cancel": self.cancel,
            "release": self.release,
            "batch": self.batch,
            "usage": self.usage,
            "reset": self.reset,
            "block": self.block,
            "unblock": self.unblock,
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

    async def acquire(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Take permits, waiting if requested."""
        fields = RequestFields.read(body, VERB_FIELDS["acquire"])
        wait = priority = 0.0
        if "wait" in fields.values or "priority" in fields.values:
            wait, priority = fields.number("wait", 0.0), fields.number("priority", 0.0)
        decision = await self.decider.acquire(fields.subject(), fields.cost() or 0, wait, priority, call)
        return HTTPReply(200, self._write(decision).encode())

    async def peek(self, body: object) -> HTTPReply:
        """Return the decision that acquire would return."""
        fields = RequestFields.read(body, VERB_FIELDS["peek"])
        return HTTPReply(200, self._write(await self.decider.peek(fields.subject(), fields.cost() or 0)).encode())

    async def reserve(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Charge an estimate."""
        fields = RequestFields.read(body, VERB_FIELDS["reserve"])
        wait, priority, ttl = fields.number("wait", 0.0), fields.number("priority", 0.0), fields.number("ttl", 60.0)
        result = await self.decider.reserve(fields.subject(), fields.cost() or 0, ttl, wait, priority, call)
        return self._decision_reply(result.decision, id=result.id)

    async def lease(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Take permits in advance."""
        fields = RequestFields.read(body, VERB_FIELDS["lease"])
        most, ttl = fields.integer("most", 1, MAX_LEASE_PERMITS), fields.number("ttl", 1.0)
        lease = await self.decider.lease(fields.subject(), fields.cost() or 0, most, ttl, call)
        terms = {"permits": lease.permits, "seconds": lease.seconds, "decay": lease.decay}
        return self._decision_reply(lease.decision, id=lease.id, **terms)

    def _decision_reply(self, decision: Decision | None, **more: object) -> HTTPReply:
        described = json.loads(self._write(None)) if decision is None else describe(decision)
        return HTTPReply(200, json.dumps({**described, **more}, separators=(",", ":")).encode())

    async def commit(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Settle a reservation with its actual cost."""
        fields = RequestFields.read(body, VERB_FIELDS["commit"])
        await self.decider.commit(fields.string("id"), fields.cost(default=None), call)
        return DONE

    async def cancel(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Cancel a reservation."""
        await self.decider.cancel(RequestFields.read(body, VERB_FIELDS["cancel"]).string("id"), call)
        return DONE

    async def release(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Release slots."""
        fields = RequestFields.read(body, VERB_FIELDS["release"])
        await self.decider.release(fields.subject(), fields.cost() or 0, call)
        return DONE

    async def usage(self, body: object) -> HTTPReply:
        """Return how much a key has used."""
        usage = await self.decider.usage(RequestFields.read(body, VERB_FIELDS["usage"]).subject())
        return HTTPReply(200, json.dumps(describe_usage(usage)).encode())

    async def reset(self, body: object) -> HTTPReply:
        """Delete the state of a key."""
        await self.decider.reset(RequestFields.read(body, VERB_FIELDS["reset"]).subject())
        return DONE

    async def block(self, body: object) -> HTTPReply:
        """Deny a key for a while."""
        fields = RequestFields.read(body, VERB_FIELDS["block"])
        seconds = await self.decider.block(fields.subject(), fields.number("seconds", DEFAULT_BLOCK_SECONDS))
        return HTTPReply(200, json.dumps({"ok": True, "seconds": seconds}).encode())

    async def unblock(self, body: object) -> HTTPReply:
        """Remove the block of a key."""
        await self.decider.unblock(RequestFields.read(body, VERB_FIELDS["unblock"]).subject())
        return DONE

    def blocks(self) -> HTTPReply:
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

    async def batch(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Decide on many asks: `keys` of one policy with a cost of 1 each, or `asks` with a subject and cost each."""
        fields = RequestFields.read(body, VERB_FIELDS["batch"])
        values = fields.values
        if ("keys" in values) == ("asks" in values):
            raise fields.error("asks", "expected either policy and keys, or asks")
        if "asks" in values:
            if "policy" in values:
                raise fields.error("policy", "cannot be combined with asks: each ask has its own policy")
            return await self._batch_asks(read_list(fields, "asks"), call)
        policy, keys = fields.string("policy"), read_list(fields, "keys")
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
            fields = RequestFields.read(ask, ASK_FIELDS, f"/asks/{number}")
            subjects.append((fields.subject(), fields.cost() or 0))
        return self._batch_reply(await self.decider.batch(subjects, call))

    def _batch_reply(self, results: list[Decision | RateLimitError | None]) -> HTTPReply:
        texts = [_error_json(each) if isinstance(each, RateLimitError) else self._write(each) for each in results]
        return HTTPReply(200, f'{{"answers":[{",".join(texts)}]}}'.encode())


def read_list(fields: RequestFields, name: str) -> list[Any]:
    """Read a list within the maximum size of a batch."""
    values = fields.values[name]
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_BATCH:
        given = f"{len(values)} items" if isinstance(values, list) else type_name(values)
        raise fields.error(name, f"expected a list of 1 to {MAX_BATCH} items, not {given}")
    return values


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
