"""The verbs as JSON over HTTP: each takes the fields of a request and gives a Reply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import RateLimitError
from tidegate.service.decisions.blocks import DEFAULT_BLOCK_SECONDS as LASTING
from tidegate.service.decisions.decider import MAX_BATCH, Subject
from tidegate.service.decisions.leases import MAX_LEASE_PERMITS as MOST_LEASED
from tidegate.service.http.json_protocol import (
    ASK_FIELDS,
    DECODER,
    VERB_FIELDS,
    BadFieldError,
    DecisionWriter,
    RequestFields,
    describe,
    describe_usage,
)
from tidegate.service.http.problems import HTTPReply, ProblemError, problem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.core.decision import Decision
    from tidegate.service.decisions.decider import Decider
    from tidegate.service.decisions.idempotency import KeyedCall

    Verb = Callable[..., Coroutine[Any, Any, HTTPReply]]  # of a body and, for those that are charged once, a KeyedCall

DONE: Final = HTTPReply(200, b'{"ok":true}')


class Verbs:
    """All verbs over one decider."""

    def __init__(self, decider: Decider) -> None:
        """Ask this decider."""
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

    def at_once(self, body: bytes) -> HTTPReply | None:
        """Answer the usual acquire: a policy and a key, at a cost of 1, in memory. None: it is another one."""
        try:
            text = body.decode()
            asked, end = DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None  # the long way says what is wrong
        if end != len(text) or asked.__class__ is not dict or len(asked) != 2:  # noqa: PLR2004 - a policy and a key
            return None
        policy, key = asked.get("policy"), asked.get("key")
        if policy.__class__ is not str or key.__class__ is not str:
            return None
        quick = self.decider.fast_path(policy)
        return None if quick is None else HTTPReply(200, self._write(quick(key)).encode())

    async def acquire(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Take permits, waiting if asked to."""
        fields = RequestFields.read(body, VERB_FIELDS["acquire"])
        wait = priority = 0.0
        if "wait" in fields.values or "priority" in fields.values:
            wait, priority = fields.number("wait", 0.0), fields.number("priority", 0.0)
        decision = await self.decider.acquire(fields.subject(), fields.cost() or 0, wait, priority, call)
        return HTTPReply(200, self._write(decision).encode())

    async def peek(self, body: object) -> HTTPReply:
        """Give the answer that acquire would give."""
        fields = RequestFields.read(body, VERB_FIELDS["peek"])
        return HTTPReply(200, self._write(await self.decider.peek(fields.subject(), fields.cost() or 0)).encode())

    async def reserve(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Charge an estimate."""
        fields = RequestFields.read(body, VERB_FIELDS["reserve"])
        wait, priority, ttl = fields.number("wait", 0.0), fields.number("priority", 0.0), fields.number("ttl", 60.0)
        held = await self.decider.reserve(fields.subject(), fields.cost() or 0, ttl, wait, priority, call)
        return self._described(held.decision, id=held.id)

    async def lease(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Take permits ahead."""
        fields = RequestFields.read(body, VERB_FIELDS["lease"])
        most, ttl = fields.whole("most", 1, MOST_LEASED), fields.number("ttl", 1.0)
        lease = await self.decider.lease(fields.subject(), fields.cost() or 0, most, ttl, call)
        told = {"permits": lease.permits, "seconds": lease.seconds, "decay": lease.decay}
        return self._described(lease.decision, id=lease.id, **told)

    def _described(self, decision: Decision | None, **more: object) -> HTTPReply:
        said = json.loads(self._write(None)) if decision is None else describe(decision)
        return HTTPReply(200, json.dumps({**said, **more}, separators=(",", ":")).encode())

    async def commit(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Settle an estimate by what it really cost."""
        fields = RequestFields.read(body, VERB_FIELDS["commit"])
        await self.decider.commit(fields.text("id"), fields.cost(default=None), call)
        return DONE

    async def cancel(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Give an estimate back."""
        await self.decider.cancel(RequestFields.read(body, VERB_FIELDS["cancel"]).text("id"), call)
        return DONE

    async def release(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Give slots back."""
        fields = RequestFields.read(body, VERB_FIELDS["release"])
        await self.decider.release(fields.subject(), fields.cost() or 0, call)
        return DONE

    async def usage(self, body: object) -> HTTPReply:
        """Tell how much a key has used."""
        usage = await self.decider.usage(RequestFields.read(body, VERB_FIELDS["usage"]).subject())
        return HTTPReply(200, json.dumps(describe_usage(usage)).encode())

    async def reset(self, body: object) -> HTTPReply:
        """Forget a key."""
        await self.decider.reset(RequestFields.read(body, VERB_FIELDS["reset"]).subject())
        return DONE

    async def block(self, body: object) -> HTTPReply:
        """Deny a key for a while."""
        fields = RequestFields.read(body, VERB_FIELDS["block"])
        lasting = await self.decider.block(fields.subject(), fields.number("seconds", LASTING))
        return HTTPReply(200, json.dumps({"ok": True, "seconds": lasting}).encode())

    async def unblock(self, body: object) -> HTTPReply:
        """Deny a key no longer."""
        await self.decider.unblock(RequestFields.read(body, VERB_FIELDS["unblock"]).subject())
        return DONE

    def blocks(self) -> HTTPReply:
        """List the blocks."""
        said = [
            {"policy": policy, "key": key if isinstance(key, str) else list(key), "seconds": seconds}
            for policy, key, seconds in self.decider.blocked()
        ]
        return HTTPReply(200, json.dumps({"blocks": said}).encode())

    async def policies(self) -> HTTPReply:
        """List the policies."""
        said = {"policies": self.decider.describe_policies(), "domains": sorted(self.decider.policies.domains)}
        return HTTPReply(200, json.dumps(said).encode())

    # ---- many at once ------------------------------------------------------------------------------------------------

    async def batch(self, body: object, call: KeyedCall | None = None) -> HTTPReply:
        """Decide on many: `keys` of one policy at a cost of 1 each, or `asks` with all that acquire can be told."""
        fields = RequestFields.read(body, VERB_FIELDS["batch"])
        values = fields.values
        if ("keys" in values) == ("asks" in values):
            raise fields.error("asks", "needs either keys, of one policy, or asks")
        if "asks" in values:
            if "policy" in values:
                raise fields.error("policy", "is for keys: each of the asks names its own")
            return await self._asks(checked(fields, "asks"), call)
        policy, keys = fields.text("policy"), checked(fields, "keys")
        quick = self.decider.fast_path(policy)
        if quick is None:
            return self._answers(await self._each(policy, keys, call))
        return self._quickly([(quick, key) for key in keys], "keys")

    async def _each(
        self, policy: str, keys: list[Any], call: KeyedCall | None
    ) -> list[Decision | RateLimitError | None]:
        """Decide on keys of one policy; what is no key is answered in its place."""
        subjects, wrong = [], {}
        for number, key in enumerate(keys):
            try:
                subjects.append((_subject(policy, key, number), 1))
            except BadFieldError as error:
                wrong[number] = error
        answers = await self.decider.batch(subjects, call)
        for place, mistake in wrong.items():
            answers.insert(place, mistake)
        return answers

    def _quickly(self, asks: list[tuple[Callable[[Any], Decision], Any]], name: str) -> HTTPReply:
        """Answer many that take the short way."""
        write, said = self._write, []
        for number, (quick, key) in enumerate(asks):
            try:
                said.append(write(quick(key)))
            except RateLimitError as error:
                said.append(_wrong(error, f"/{name}/{number}"))
        return HTTPReply(200, f'{{"answers":[{",".join(said)}]}}'.encode())

    def _usual(self, asks: list[Any]) -> list[tuple[Callable[[Any], Decision], Any]] | None:
        """Find the short way of each ask that is just a policy and a key; None: one of them is not, or has none."""
        found = []
        for ask in asks:
            if ask.__class__ is not dict or len(ask) != 2:  # noqa: PLR2004 - a policy and a key
                return None
            policy, key = ask.get("policy"), ask.get("key")
            if policy.__class__ is not str or key.__class__ is not str:
                return None
            quick = self.decider.fast_path(policy)
            if quick is None:
                return None
            found.append((quick, key))
        return found

    async def _asks(self, asks: list[object], call: KeyedCall | None) -> HTTPReply:
        """Read all asks before the first is decided: a batch that cannot be understood charges nothing."""
        usual = self._usual(asks)
        if usual is not None:
            return self._quickly(usual, "asks")
        read = []
        for number, ask in enumerate(asks):
            fields = RequestFields.read(ask, ASK_FIELDS, f"/asks/{number}")
            read.append((fields.subject(), fields.cost() or 0))
        return self._answers(await self.decider.batch(read, call))

    def _answers(self, answers: list[Decision | RateLimitError | None]) -> HTTPReply:
        said = [_wrong(each) if isinstance(each, RateLimitError) else self._write(each) for each in answers]
        return HTTPReply(200, f'{{"answers":[{",".join(said)}]}}'.encode())


def checked(fields: RequestFields, name: str) -> list[Any]:
    """Take a list of a size that is allowed."""
    values = fields.values[name]
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_BATCH:
        raise fields.error(name, f"expected a list of 1 to {MAX_BATCH}")
    return values


def _subject(policy: str, key: object, number: int) -> Subject:
    try:
        return RequestFields({"policy": policy, "key": key}).subject()
    except BadFieldError as error:
        raise BadFieldError(f"/keys/{number}", error.detail) from None


def _wrong(error: RateLimitError, pointer: str | None = None) -> str:
    """Word what was wrong with one of many."""
    problem: ProblemError = problem_of(error)
    if pointer is not None:
        problem.pointer = pointer
    return f'{{"error":{problem.reply().body.decode()}}}'
