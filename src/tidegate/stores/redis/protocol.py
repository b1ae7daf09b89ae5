"""Encodes calls as scripts for core.lua, and decodes its replies as decisions.

All values are numbers of 8 bytes in a few strings, so that a call is short and needs no parsing, and a policy is sent
once for all calls of a script that use it. All numbers are integers below 2**53; Lua receives doubles and returns
integers, which is the fastest for both sides.

A PendingCall is one call of a store: asks that are decided together, and operations on values (value_steps.py) that are
performed in the same step; either may be missing. A Script is one round trip: calls made at about
the same time, each decided separately and in order, as if it were the only one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import blake2b, sha1
from pathlib import Path
from struct import Struct, unpack
from typing import TYPE_CHECKING, Final

from tidegate.core.decision import VERBS, Decision
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable
from tidegate.stores.base import Alternatives, check_ported
from tidegate.stores.redis.value_steps import Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tidegate.clock import Clock
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.redis.address import RedisAddress
    from tidegate.stores.redis.value_steps import ValueStep
    from tidegate.stores.values import Collection

SCRIPT: Final = Path(__file__).with_name("core.lua").read_bytes()
NO_INSTANT: Final = -(2**53)  # encodes None: the server's clock, or the latest charge
NEEDS_WINDOW: Final = 2
EXPIRY_MARGIN: Final = 1000  # milliseconds for which a key is kept after its state has expired
MANUAL_EXPIRY: Final = 3_600_000  # the same for a manual clock: real time may pass while it does not advance
MAX_LIMITS_PER_CALL: Final = 1000  # limits in one call, since a script blocks the server
MAX_WINDOW_RETRIES: Final = 4  # how often a call is sent again because a calendar window was missing
VERB_NUMBERS: Final = {verb: number for number, verb in enumerate(VERBS, start=1)}
ALTERNATIVE: Final = 8  # added to the number of a verb that is decided only if the alternative before it was denied
CALL_HEAD: Final = Struct("<6d")
SHORT_CALL: Final = Struct("<3d")
MAX_SHORT_FORM_LIMITS: Final = (
    1000  # limits in a script of the short form, whose replies are all on the stack of Lua at once
)
MAX_IN_FLIGHT: Final = 8  # scripts in flight on a connection: a few milliseconds of the server's time
COST_UNIT_TIMEOUT: Final = 0.000_05  # seconds for one unit of `Algorithm.port_cost`, on a slow and busy machine
ASK_STRUCTS: Final = [Struct(f"<{1 + count}d") for count in range(MAX_LIMITS_PER_CALL + 1)]
LIMIT_NUMBERS: Final = Struct("<13d")
ESCAPES: Final = str.maketrans({"%": "%25", "/": "%2F", "{": "%7B", "}": "%7D"})
VALUES: Final = "%v/"  # begins the name of a value; no policy and no key has it, since they are escaped


class PendingCall(ABC):
    """One call: asks that are decided together, operations on values, and a caller that waits for the answer."""

    __slots__ = ("asks", "at", "missing_windows", "now", "values", "verb", "weight")

    def __init__(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, values: ValueStep | None = None
    ) -> None:
        """Keep the arguments of `Store.apply`."""
        self.verb: str = verb
        self.asks: Sequence[Ask] = asks
        self.now: int | None = now
        self.at: int | None = at
        self.values: ValueStep | None = values
        self.missing_windows: tuple[int, ...] = ()
        self.weight: int = len(asks[0][0].limits) if len(asks) == 1 else sum(len(ask[0].limits) for ask in asks)
        if self.weight > MAX_LIMITS_PER_CALL:
            message = f"a call checks {self.weight} limits; at most {MAX_LIMITS_PER_CALL} are allowed: split the call"
            raise ConfigError(message)

    @property
    def groups(self) -> Sequence[Sequence[Ask]]:
        """The asks that are decided together; several groups if they are alternatives."""
        return self.asks.groups() if isinstance(self.asks, Alternatives) else (self.asks,)

    @property
    def dropped(self) -> bool:
        """Whether the caller is gone, so that the call need not be sent."""
        return False

    @abstractmethod
    def set_answer(self, answer: list[Decision] | RateLimitError) -> None:
        """Pass the answer to the caller."""


class Script:
    """One round trip. `full` means that the source is sent, for a server that does not know the script.

    `cost` is its cost in the server, in units of `Algorithm.port_cost`.
    """

    __slots__ = ("_encoded", "asking", "calls", "cost", "full", "protocol", "redirected", "slot")

    def __init__(self, protocol: ScriptProtocol, calls: Sequence[PendingCall], slot: int = 0, cost: int = 0) -> None:
        """Carry these calls. In a cluster, their keys are in `slot`."""
        self.protocol: ScriptProtocol = protocol
        self.calls: Sequence[PendingCall] = calls
        self.cost: int = cost
        self.full: bool = False
        self.slot: int = slot
        self.redirected: int = 0
        self.asking: tuple[str, int] | None = None  # the server that is importing the slot (ASK redirection)
        self._encoded: tuple[list[bytes], list[bytes]] | None = None

    @property
    def extra_timeout(self) -> float:
        """How many seconds more than the timeout the server may take, because the script is expensive."""
        return self.cost * COST_UNIT_TIMEOUT

    def drop_cancelled(self) -> bool:
        """Remove calls that were dropped before they were sent; return whether any is left."""
        dropped = [] if self._encoded else [call for call in self.calls if call.dropped]
        if dropped:
            self.calls = [call for call in self.calls if not call.dropped]
            for call in dropped:
                call.set_answer(Closed("the call was cancelled before it was sent"))
        return bool(self.calls)

    def command(self) -> list[bytes]:
        """Return the words of the command that runs it."""
        if self._encoded is None:
            self._encoded = self.protocol.encode(self.calls)
        keys, tail = self._encoded
        how = [b"EVAL", self.protocol.source] if self.full else [b"EVALSHA", self.protocol.sha]
        return [*how, b"%d" % len(keys), *keys, *tail]

    def pack(self) -> bytes:
        """Return the command in the Redis protocol."""
        words = self.command()
        packed = b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
        return packed if self.asking is None else b"*1\r\n$6\r\nASKING\r\n" + packed

    def receive(self, reply: bytes) -> list[PendingCall]:
        """Answer the calls; return those to be sent again because a calendar window was missing."""
        numbers = unpack(f"<{len(reply) // 8}q", reply)
        position, repeated = 0, []
        for call in self.calls:
            decisions: list[Decision] = []
            for asks in call.groups:
                status, at = numbers[position], numbers[position + 1]
                position += 2
                if status >= NEEDS_WINDOW:
                    break
                for policy, _, _ in asks:
                    limits = policy.limits
                    end = position + 3 * len(limits)
                    views = [numbers[i : i + 3] for i in range(position, end, 3)]
                    decisions.append(Decision.of_signed_views(at, limits, views, within_limits=status == 1))
                    position = end
                if status == 1:
                    break
            if status < NEEDS_WINDOW:
                if status and call.values is not None:
                    position = call.values.receive(Reply(reply, numbers), position)
                call.set_answer(decisions)
            elif status != NEEDS_WINDOW and call.values is not None:
                error, position = call.values.refusal(Reply(reply, numbers), position - 2)
                call.set_answer(error)
            elif self._add_window(call, at):
                repeated.append(call)
        return repeated

    def _add_window(self, call: PendingCall, at: int) -> bool:
        """Add the window of an instant to a call; return whether it can be sent again."""
        if len(call.missing_windows) >= MAX_WINDOW_RETRIES:
            message = f"the server's clock jumps or is wrong: it shows {at} us since 1970; check its clock"
            call.set_answer(StoreUnavailable(message))
            return False
        call.missing_windows = (*call.missing_windows, at)
        if call.now is None and len(call.missing_windows) == 1:
            self.protocol.record_server_time(at)
        return True

    def fail(self, error: RateLimitError) -> None:
        """Answer all calls with an error."""
        for call in self.calls:
            call.set_answer(error)


class ScriptProtocol:
    """Encodes policies, keys and calls."""

    def __init__(
        self, address: RedisAddress, clock: Clock, slot: Callable[[bytes], int] | None, source: bytes = SCRIPT
    ) -> None:
        """Encode for the server at `address`; `slot` returns the cluster slot of a key."""
        self.source = source
        self.sha: bytes = sha1(source, usedforsecurity=False).hexdigest().encode()  # for EVALSHA
        self.batch: int = address.batch
        self._clock = clock
        self._slot = slot
        self.slotted: bool = slot is not None
        self._skew = 0  # how far the server's clock is ahead of ours; selects the calendar windows to send
        self._policies: dict[int, EncodedPolicy] = {}
        self._start = {
            "key": f"{address.prefix}:{{",
            "policy": f"{address.prefix}:{{",
            "all": f"{{{address.prefix}}}:",
        }[address.hash_tag]
        self._hash_tag = address.hash_tag
        self._prefix = f"{{{address.prefix}}}" if address.hash_tag == "all" else address.prefix

    def marker(self, number: int | None) -> bytes:
        """Return the key of a server's marker (see server_watch.py); markers of a cluster are numbered."""
        tag = "" if number is None else f"{{{number}}}"
        return f"{self._prefix}:marker{tag}".encode()

    def slot(self, key: bytes) -> int:
        """Return the cluster slot of a key."""
        return 0 if self._slot is None else self._slot(key)

    def record_server_time(self, now: int) -> None:
        """Record the server's time."""
        self._skew = now - self._clock.ns() // 1000

    def encode_policy(self, policy: Policy) -> EncodedPolicy:
        """Return the encoded form of a policy."""
        encoded_policy = self._policies.get(id(policy))
        if encoded_policy is None:
            if len(self._policies) > MAX_LIMITS_PER_CALL:
                self._policies.clear()
            encoded_policy = self._policies[id(policy)] = EncodedPolicy(policy, *self._around_key(policy.name))
        return encoded_policy

    def _around_key(self, policy: str) -> tuple[str, str]:
        """Return what precedes and what follows a key of a policy in its name in the store."""
        before = f"{self._start}{policy.translate(ESCAPES)}/"
        return (f"{before}}}", "") if self._hash_tag == "policy" else (before, "}" if self._hash_tag == "key" else "")

    def value_keys(self, collection: Collection, name: str) -> list[bytes]:
        """Return the key of a value; of a listed collection, the keys of its values and of their ends."""
        own = VALUES + collection.identity.replace("{", "%7B").replace("}", "%7D")
        if not collection.listed:
            own += f"/{name.translate(ESCAPES)}"
        if self._hash_tag == "all":
            own = self._start + own
        elif collection.beside is None:
            own = f"{self._start}{own}}}"
        else:
            before, after = self._around_key(collection.beside[0])
            own = f"{before}{escape_key(collection.beside[1]) if after else ''}{after}{own}"
        key = own.encode("utf-8", "surrogatepass")
        return [key, key + b":ends"] if collection.listed else [key]

    def scripts(self, calls: Sequence[PendingCall]) -> Iterator[Script]:
        """Divide calls into scripts, for a cluster one or more per slot.

        A script has at most `batch` calls and costs at most as much as `batch` calls to two buckets, so that it does
        not block the server for long; a single call may cost more.
        """
        slots: dict[int, Sequence[PendingCall]] = {0: calls}
        if self._slot is not None:
            by_slot: dict[int, list[PendingCall]] = {}
            for call in calls:
                by_slot.setdefault(self.slot_of(call), []).append(call)
            slots = dict(by_slot)
        for slot, slot_calls in slots.items():
            start, cost = 0, 0
            for i, call in enumerate(slot_calls):
                more = self._cost_of(call)
                if i > start and (cost + more > 2 * self.batch or i - start >= self.batch):
                    yield Script(self, slot_calls[start:i], slot, cost)
                    start, cost = i, 0
                cost += more
            yield Script(self, slot_calls[start:], slot, cost)

    def _cost_of(self, call: PendingCall) -> int:
        if len(call.asks) == 1 and call.values is None:
            return self.encode_policy(call.asks[0][0]).cost
        cost = 0 if call.values is None else call.values.cost
        return cost + sum([self.encode_policy(policy).cost for policy, _, _ in call.asks])

    def slot_of(self, call: PendingCall) -> int:
        """Return the cluster slot of all keys of a call. Raises ConfigError if they are in different slots."""
        if self._slot is None:
            return 0
        slots = {self._slot(self.encode_policy(policy).key(key)) for policy, key, _ in call.asks}
        if call.values is not None:
            slots |= set(map(self._slot, call.values.keys(self.value_keys)))
        if len(slots) > 1:
            message = (
                "the keys of one call are in different slots of the cluster: open the store with ?hash_tag=policy "
                "(all keys of a policy in one slot) or ?hash_tag=all (all keys in one slot)"
            )
            if call.values is not None:
                message += "; values are in the slot of a key if their collection names it (`beside`)"
            raise ConfigError(message)
        return slots.pop()

    def encode(self, calls: Sequence[PendingCall]) -> tuple[list[bytes], list[bytes]]:
        """Encode calls as keys and arguments of core.lua."""
        short = self._encode_short(calls)
        if short is not None:
            return short
        arguments: dict[bytes, int] = {}  # policies and operations on values, and their numbers
        keys: list[bytes] = []
        value_keys: list[bytes] = []
        encoded_calls = []
        for call in calls:
            now, at, operations = call.now, call.at, 0
            if call.values is not None:
                operations = arguments.setdefault(call.values.encode(value_keys, self.value_keys), len(arguments) + 1)
            for index, asks in enumerate(call.groups):
                encoded_calls.append(
                    CALL_HEAD.pack(
                        VERB_NUMBERS[call.verb] + (ALTERNATIVE if index else 0),
                        NO_INSTANT if now is None else now,
                        EXPIRY_MARGIN if now is None else MANUAL_EXPIRY,
                        NO_INSTANT if at is None else at,
                        len(asks),
                        0 if index else operations,
                    )
                )
                for policy, key, costs in asks:
                    encoded_policy = self.encode_policy(policy)
                    encoded = encoded_policy.encoded or self._encode_windows(encoded_policy, call)
                    number = arguments.setdefault(encoded, len(arguments) + 1)
                    encoded_calls.append(ASK_STRUCTS[len(costs)].pack(number, *costs))
                    name = encoded_policy.key(key)
                    keys.append(name)
                    if encoded_policy.logs:
                        keys.extend([name + log for log in encoded_policy.logs])
        return [*keys, *reversed(value_keys)], [b"".join(encoded_calls), *arguments]

    def _encode_short(self, calls: Sequence[PendingCall]) -> tuple[list[bytes], list[bytes]] | None:
        """Encode calls in the short form, if all acquire from buckets, with one key each, at the same instant."""
        policy_numbers: dict[bytes, int] = {}
        keys: list[bytes] = []
        now = calls[0].now
        encoded_calls = [
            SHORT_CALL.pack(0, NO_INSTANT, EXPIRY_MARGIN) if now is None else SHORT_CALL.pack(0, now, MANUAL_EXPIRY)
        ]
        policies = self._policies
        for call in calls:
            if call.verb != "acquire" or len(call.asks) != 1 or call.now != now or call.at is not None or call.values:
                return None
            policy, key, costs = call.asks[0]
            encoded_policy = policies.get(id(policy)) or self.encode_policy(policy)
            if not encoded_policy.buckets:
                return None
            encoded_calls.append(
                encoded_policy.encode_short(
                    policy_numbers.setdefault(encoded_policy.encoded, len(policy_numbers) + 1), costs
                )
            )
            keys.append(encoded_policy.key(key))
        if sum([call.weight for call in calls]) > MAX_SHORT_FORM_LIMITS:
            return None
        return keys, [b"".join(encoded_calls), *policy_numbers]

    def _encode_windows(self, encoded_policy: EncodedPolicy, call: PendingCall) -> bytes:
        now = call.now if call.now is not None else self._clock.ns() // 1000 + self._skew
        return encoded_policy.encode_at(now, call.missing_windows)


class EncodedPolicy:
    """A policy in encoded form. `encoded` is empty if calendar windows make it depend on the time."""

    __slots__ = (
        "_after",
        "_before",
        "_recent",
        "_short",
        "_since",
        "_until",
        "buckets",
        "cost",
        "encoded",
        "logs",
        "policy",
    )

    def __init__(self, policy: Policy, before: str, after: str) -> None:
        """Encode what does not depend on the time. A key is written between `before` and `after`."""
        self.policy: Policy = policy  # kept alive, so that its id() stays unique
        self._before = before
        self._after = after
        self.logs: list[bytes] = [b":%x" % limit_id(limit) for limit in policy.limits if limit.rules.logged]
        self.buckets: bool = all(limit.rules.refills for limit in policy.limits)
        self.cost: int = sum(limit.rules.port_cost for limit in policy.limits)
        self.encoded: bytes = b""
        self._recent, self._since, self._until = b"", 0, 0
        self._short: dict[tuple[int, tuple[int, ...]], bytes] = {}
        if all(limit.calendar is None for limit in policy.limits):
            self.encoded = b"".join(encode_limit(limit, ()) for limit in policy.limits)

    def encode_short(self, number: int, costs: tuple[int, ...]) -> bytes:
        """Encode a call of the short form with these costs."""
        encoded = self._short.get((number, costs))
        if encoded is None:
            encoded = ASK_STRUCTS[len(costs)].pack(number, *costs)
            if len(self._short) < MAX_LIMITS_PER_CALL:
                self._short[number, costs] = encoded
        return encoded

    def key(self, key: Key) -> bytes:
        """Return the name of a key in the store."""
        return f"{self._before}{escape_key(key)}{self._after}".encode("utf-8", "surrogatepass")

    def encode_at(self, now: int, missing_windows: tuple[int, ...]) -> bytes:
        """Encode the policy with the calendar windows around `now` and around the missing instants."""
        if not missing_windows and self._since <= now < self._until:
            return self._recent
        encoded = b"".join(encode_limit(limit, (now, *missing_windows)) for limit in self.policy.limits)
        if not missing_windows:
            around = [limit.calendar.window(now) for limit in self.policy.limits if limit.calendar]
            self._recent = encoded
            self._since, self._until = max(start for start, _ in around), min(end for _, end in around)
        return encoded


def escape_key(key: Key) -> str:
    """Return a key as one string, without what separates the parts of a name in the store."""
    if not isinstance(key, str):
        return "/".join([part.translate(ESCAPES) for part in key])
    if "/" in key or "%" in key or "{" in key or "}" in key:
        return key.translate(ESCAPES)
    return key


def encode_limit(limit: Limit, instants: tuple[int, ...]) -> bytes:
    """Encode a limit, with the calendar windows before, at and after some instants."""
    windows: list[int] = []
    if limit.calendar is not None:
        spans: dict[int, int] = {}
        for instant in instants:
            start, end = limit.calendar.window(instant)
            before, after = limit.calendar.window(start - 1), limit.calendar.window(end)
            spans.update({start: end, before[0]: before[1], after[0]: after[1]})
        windows = [bound for span in spans.items() for bound in span]
    check_ported(limit)
    rules = limit.rules
    numbers = LIMIT_NUMBERS.pack(
        rules.port_size,
        limit_id(limit),
        owner_id(limit),
        limit.scale,
        limit.rate,
        limit.capacity,
        rules.port_number,
        limit.quota,
        limit.length,
        limit.burst,
        limit.floor,
        limit.tick,
        len(windows),
    )
    return numbers + Struct(f"<{len(windows)}d").pack(*windows)


def limit_id(limit: Limit) -> int:
    """Return the identifier of a limit in the store, from its name and algorithm. Below 2**52."""
    return _digest(limit.name) * 8 + limit.rules.port_number


def owner_id(limit: Limit) -> int:
    """Return a digest of all settings of a limit. Below 2**48."""
    return _digest(repr(limit))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
