"""Encodes calls for core.lua, and decodes its replies as decisions.

All values are numbers of 8 bytes in a few strings, so that a call is short and needs no parsing, and a policy is sent
once for all calls of a script that use it. All numbers are integers below 2**53; Lua receives doubles and returns
integers, which is the fastest for both sides.

A PendingCall is one call of a store: asks that are decided together, and operations on values (value_steps.py) that are
performed in the same step; either may be missing. A Script is one round trip: calls made at about
the same time, each decided separately and in order, as if it were the only one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import blake2b
from struct import Struct, unpack
from struct import error as StructError  # noqa: N812 - a class
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._algorithms import View
from tidegate.core._decision import VERBS, Decision
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable
from tidegate.stores._base import Alternatives, check_ported
from tidegate.stores._redis import driver
from tidegate.stores._redis.library import MAX_LOADS, SOURCE, Form, Library, pack_command, pack_words
from tidegate.stores._redis.value_steps import KEY_REFUSED, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.core._limit import Limit
    from tidegate.stores._base import Ask
    from tidegate.stores._redis.address import RedisAddress
    from tidegate.stores._redis.value_steps import ValueStep
    from tidegate.stores._values import Collection

NO_INSTANT: Final = -(2**53)  # encodes None: the server's clock, or the latest charge
NEEDS_WINDOW: Final = 2
EXPIRY_MARGIN: Final = 1000  # milliseconds for which a key is kept after its state has expired, as in core.lua
MANUAL_EXPIRY: Final = 3_600_000  # the same for a manual clock: real time may pass while it does not advance
MAX_LIMITS_PER_CALL: Final = 1000  # limits in one call, since a script blocks the server
MAX_WINDOW_RETRIES: Final = 4  # how often a call is sent again because a calendar window was missing
VERB_NUMBERS: Final = {verb: number for number, verb in enumerate(VERBS, start=1)}
ALTERNATIVE: Final = 8  # added to the number of a verb that is decided only if the alternative before it was denied
TIMED: Final = 16  # added to the number of a verb that is followed by instants
GROUP_HEAD: Final = Struct("<3d")  # the verb, the number of asks, the operations on values
INSTANTS: Final = Struct("<3d")
ASKING: Final = pack_command(b"ASKING")
MAX_IN_FLIGHT: Final = 8  # scripts in flight on a connection: a few milliseconds of the server's time
COST_UNIT_TIMEOUT: Final = 0.000_05  # seconds for one unit of `Algorithm.port_cost`, on a slow and busy machine
ASK_STRUCTS: Final = [Struct(f"<{1 + count}d") for count in range(MAX_LIMITS_PER_CALL + 1)]
LIMIT_NUMBERS: Final = Struct("<13d")
FORMAT: Final = 65_536  # added to the count of each record, as in core.lua
ESCAPES: Final = str.maketrans({"%": "%25", "/": "%2F", "{": "%7B", "}": "%7D"})
# No policy, key or collection contains these in its name in the store, since they are escaped.
VALUES: Final = "%v/"  # begins the name of a value
LOG: Final = "%l"  # follows the name of a key in that of its logs
ENDS: Final = b"%e"  # follows the name of a listed collection in that of the ends of its values


class PendingCall(ABC):
    """One call: asks that are decided together, operations on values, and a caller that waits for the answer."""

    __slots__ = ("asking", "asks", "at", "missing_windows", "now", "redirected", "slot", "values", "verb")

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
        self.slot: int = 0  # in a cluster, of all its keys
        self.redirected: int = 0  # how often a server of the cluster has redirected it
        self.asking: tuple[str, int] | None = None  # the server that is importing the slot (ASK redirection)
        count = len(asks[0][0].limits) if len(asks) == 1 else sum([len(ask[0].limits) for ask in asks])
        if count > MAX_LIMITS_PER_CALL:
            message = f"a call checks {count} limits; at most {MAX_LIMITS_PER_CALL} are allowed: split the call"
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


class Encoded(NamedTuple):
    """Calls in the Redis protocol, except for the first two words of the command."""

    words: int
    packed: bytes
    single: bool  # one ask without values


class Script:
    """One round trip. `form` is how it is sent; by default, as the connection sends others.

    `cost` is its cost in the server, in units of `Algorithm.port_cost`.
    """

    __slots__ = ("_encoded", "asking", "calls", "cost", "form", "load_error", "loads", "protocol", "slot")

    def __init__(self, protocol: ScriptProtocol, calls: Sequence[PendingCall], slot: int = 0, cost: int = 0) -> None:
        """Carry these calls. In a cluster, their keys are in `slot`."""
        self.protocol: ScriptProtocol = protocol
        self.calls: Sequence[PendingCall] = calls
        self.cost: int = cost
        self.form: Form | None = None
        self.loads: int = 0  # how often it was sent with FUNCTION LOAD
        self.load_error: Exception | None = None  # why the library could not be loaded
        self.slot: int = slot
        self.asking: tuple[str, int] | None = calls[0].asking  # as of its calls
        self._encoded: Encoded | None = None

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

    def pack(self, form: Form) -> bytes:
        """Return the commands in the Redis protocol; `form` is that of the connection."""
        self.form = form = self.form or form
        if self._encoded is None:
            self._encoded = self.protocol.encode(self.calls)
        words, packed, single = self._encoded
        library = self.protocol.library
        command = b"*%d\r\n%b%b" % (2 + words, library.first_words(form, single=single), packed)
        if self.asking is not None:
            command = ASKING + command
        if form is Form.LOAD:
            self.loads += 1
            return library.load + command
        return command

    @property
    def preceding_replies(self) -> int:
        """How many replies precede that of the script: those of FUNCTION LOAD and ASKING."""
        return (self.form is Form.LOAD) + (self.asking is not None)

    def receive_preceding(self, reply: object) -> None:
        """Receive a preceding reply. ASKING never fails, and the library may have been loaded by another process."""
        if isinstance(reply, Exception):
            self.load_error = reply
            if "already exists" not in str(reply):
                self.loads = MAX_LOADS

    def handle_reply(self, reply: bytes | Exception, address: RedisAddress) -> list[Script]:
        """Answer the calls; return the scripts to be sent next."""
        if isinstance(reply, bytes):
            try:
                again = self.receive(reply)
            except (IndexError, StructError):  # not a reply of core.lua
                self.fail(driver.explain(address, ValueError(f"a reply of {len(reply)} bytes cannot be read")))
                return []
            return list(self.protocol.scripts(again)) if again else []
        following = self.form.following(reply, self.loads) if self.form is not None else None
        if following is not None:
            self.form = following
            return [self]
        if isinstance(reply, RateLimitError):
            self.fail(reply)
        else:
            self.fail(driver.explain(address, reply, self.load_error))
        return []

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
                    views = [View(numbers[i : i + 3]) for i in range(position, end, 3)]
                    decisions.append(Decision.of_views(at, limits, views, within_limits=status == 1))
                    position = end
                if status == 1:
                    break
            if status < NEEDS_WINDOW:
                if status and call.values is not None:
                    position = call.values.receive(Reply(reply, numbers), position)
                call.set_answer(decisions)
            elif status != NEEDS_WINDOW:
                error, position = self._read_refusal(call, Reply(reply, numbers), position - 2)
                call.set_answer(error)
            elif self._add_window(call, at):
                repeated.append(call)
        return repeated

    def _read_refusal(self, call: PendingCall, reply: Reply, position: int) -> tuple[RateLimitError, int]:
        """Return why the server refused a call, from the answer at a position, and the position after it."""
        if reply.numbers[position] != KEY_REFUSED and call.values is not None:
            return call.values.refusal(reply, position)
        reason, position = reply.read_bytes(position + 2)
        return driver.explain_refused(self.protocol.address, reason.decode(errors="replace")), position

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
        self, address: RedisAddress, clock: Clock, slot: Callable[[bytes], int] | None, source: bytes = SOURCE
    ) -> None:
        """Encode for the server at `address`; `slot` returns the cluster slot of a key."""
        self.library: Library = Library(source)
        self.address = address
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
        return [key, key + ENDS] if collection.listed else [key]

    def scripts(self, calls: Sequence[PendingCall]) -> Iterator[Script]:
        """Divide calls into scripts, for a cluster one or more per slot.

        A script has at most `batch` calls and costs at most as much as `batch` calls to two buckets, so that it does
        not block the server for long; a single call may cost more.
        """
        slots: Sequence[Sequence[PendingCall]] = (calls,)
        if self._slot is not None:
            by_slot: dict[object, list[PendingCall]] = {}
            for call in calls:
                by_slot.setdefault((call.slot, call.asking), []).append(call)
            slots = list(by_slot.values())
        for slot_calls in slots:
            slot = slot_calls[0].slot
            start, cost = 0, 0
            for i, call in enumerate(slot_calls):
                more = self.cost_of(call)
                if i > start and (cost + more > 2 * self.batch or i - start >= self.batch):
                    yield Script(self, slot_calls[start:i], slot, cost)
                    start, cost = i, 0
                cost += more
            yield Script(self, slot_calls[start:], slot, cost)

    def cost_of(self, call: PendingCall) -> int:
        """Return the cost of a call in the server, in units of `Algorithm.port_cost`."""
        if len(call.asks) == 1 and call.values is None:
            policy = call.asks[0][0]
            return (self._policies.get(id(policy)) or self.encode_policy(policy)).cost
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

    def first_slot(self, asks: Sequence[Ask], values: Sequence[tuple[Collection, str]]) -> int:
        """Return the cluster slot of the first key."""
        if self._slot is None or not (asks or values):
            return 0
        if asks:
            policy, key, _ = asks[0]
            return self._slot(self.encode_policy(policy).key(key))
        return self._slot(self.value_keys(*values[0])[0])

    def encode(self, calls: Sequence[PendingCall]) -> Encoded:
        """Encode calls as keys and arguments of core.lua."""
        if len(calls) == 1 and len(calls[0].asks) == 1 and calls[0].values is None:
            return self._encode_one(calls[0])
        arguments: dict[bytes, int] = {}  # policies and operations on values, and their numbers
        keys: list[bytes] = []
        value_keys: list[bytes] = []
        groups = []
        policies = self._policies
        for call in calls:
            operations = 0
            if call.values is not None:
                operations = arguments.setdefault(call.values.encode(value_keys, self.value_keys), len(arguments) + 1)
            elif len(call.asks) == 1 and call.now is None and call.at is None:
                policy, key, costs = call.asks[0]
                encoded_policy = policies.get(id(policy)) or self.encode_policy(policy)
                encoded = encoded_policy.encoded or self._encode_windows(encoded_policy, call)
                number = arguments.setdefault(encoded, len(arguments) + 1)
                groups.append(encoded_policy.encode_group(call.verb, number, costs))
                keys += encoded_policy.keys(key)
                continue
            for index, asks in enumerate(call.groups):
                groups.append(encode_head(call, len(asks), 0 if index else operations, alternative=bool(index)))
                for policy, key, costs in asks:
                    encoded_policy = self.encode_policy(policy)
                    encoded = encoded_policy.encoded or self._encode_windows(encoded_policy, call)
                    number = arguments.setdefault(encoded, len(arguments) + 1)
                    groups.append(ASK_STRUCTS[len(costs)].pack(number, *costs))
                    keys += encoded_policy.keys(key)
        keys += reversed(value_keys)
        words = (b"%d" % len(keys), *keys, b"".join(groups), *arguments)
        return Encoded(len(words), pack_words(*words), single=False)

    def _encode_one(self, call: PendingCall) -> Encoded:
        policy, key, costs = call.asks[0]
        encoded_policy = self._policies.get(id(policy)) or self.encode_policy(policy)
        if call.now is None and call.at is None and encoded_policy.encoded:
            tail = encoded_policy.encode_single(call.verb, costs)
        else:
            group = encode_head(call, 1) + ASK_STRUCTS[len(costs)].pack(1, *costs)
            tail = pack_words(group, encoded_policy.encoded or self._encode_windows(encoded_policy, call))
        keys = encoded_policy.keys(key)
        return Encoded(len(keys) + 3, pack_words(b"%d" % len(keys), *keys) + tail, single=True)

    def _encode_windows(self, encoded_policy: EncodedPolicy, call: PendingCall) -> bytes:
        now = call.now if call.now is not None else self._clock.ns() // 1000 + self._skew
        return encoded_policy.encode_at(now, call.missing_windows)


class EncodedPolicy:
    """A policy in encoded form. `encoded` is empty if calendar windows make it depend on the time."""

    __slots__ = (
        "_after",
        "_before",
        "_groups",
        "_recent",
        "_since",
        "_tagged",
        "_tails",
        "_until",
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
        self._tagged = bool(policy.shares_slot and after)  # whether only the first part of a key is in the hash tag
        self.logs: list[bytes] = [f"{LOG}{limit_id(limit):x}".encode() for limit in policy.limits if limit.rules.logged]
        self.cost: int = sum(limit.rules.port_cost for limit in policy.limits)
        self.encoded: bytes = b""
        self._recent, self._since, self._until = b"", 0, 0
        self._groups: dict[tuple[str, int, tuple[int, ...]], bytes] = {}
        self._tails: dict[tuple[str, tuple[int, ...]], bytes] = {}
        if all(limit.calendar is None for limit in policy.limits):
            self.encoded = b"".join(encode_limit(limit, ()) for limit in policy.limits)

    def encode_group(self, verb: str, number: int, costs: tuple[int, ...]) -> bytes:
        """Encode a group of one ask without instants; `number` is that of the policy."""
        group = self._groups.get((verb, number, costs))
        if group is None:
            group = GROUP_HEAD.pack(VERB_NUMBERS[verb], 1, 0) + ASK_STRUCTS[len(costs)].pack(number, *costs)
            if len(self._groups) < MAX_LIMITS_PER_CALL:
                self._groups[verb, number, costs] = group
        return group

    def encode_single(self, verb: str, costs: tuple[int, ...]) -> bytes:
        """Encode the arguments of a call of one ask without instants, packed."""
        tail = self._tails.get((verb, costs))
        if tail is None:
            tail = pack_words(self.encode_group(verb, 1, costs), self.encoded)
            if len(self._tails) < MAX_LIMITS_PER_CALL:
                self._tails[verb, costs] = tail
        return tail

    def keys(self, key: Key) -> list[bytes]:
        """Return the names of a key and of its logs in the store."""
        name = self.key(key)
        return [name, *[name + log for log in self.logs]] if self.logs else [name]

    def key(self, key: Key) -> bytes:
        """Return the name of a key in the store."""
        if self._tagged and not isinstance(key, str):
            name = f"{self._before}{escape_key(key[0])}{self._after}/{escape_key(key[1:])}"
            return name.encode("utf-8", "surrogatepass")
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


def encode_head(call: PendingCall, asks: int, operations: int = 0, *, alternative: bool = False) -> bytes:
    """Encode what precedes the asks of a group."""
    verb = VERB_NUMBERS[call.verb] + (ALTERNATIVE if alternative else 0)
    now, at = call.now, call.at
    if now is None and at is None:
        return GROUP_HEAD.pack(verb, asks, operations)
    slack = EXPIRY_MARGIN if now is None else MANUAL_EXPIRY
    instants = INSTANTS.pack(NO_INSTANT if now is None else now, slack, NO_INSTANT if at is None else at)
    return GROUP_HEAD.pack(verb + TIMED, asks, operations) + instants


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
        FORMAT + rules.port_size,
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
