"""Calls as scripts, answers as decisions: what core.lua is sent and what it sends back.

Everything travels as numbers of 8 bytes in a few strings, so that a call costs a few bytes and no parsing, and a policy
is sent once however many calls of a script ask for it. All are whole and below 2**53; Lua takes doubles and gives
integers, which is the cheapest for both sides.

A Group is one call of a store: asks that are decided together. A Script is one round trip: groups of whoever called at
about the same time, each decided by itself and in order, so that none can tell it was not alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import blake2b, sha1
from pathlib import Path
from struct import Struct, unpack
from typing import TYPE_CHECKING, Final

from tidegate.core.algorithms import ALGORITHMS
from tidegate.core.decision import VERBS, Decision
from tidegate.errors import Closed, ConfigError, RateLimitError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tidegate.clock import Clock
    from tidegate.core.limit import Limit
    from tidegate.policy import Key, Policy
    from tidegate.stores.base import Ask
    from tidegate.stores.redis.address import RedisAddress

SCRIPT: Final = Path(__file__).with_name("core.lua").read_bytes()
NO_INSTANT: Final = -(2**53)  # no instant: by the server's clock, or whichever charge was the latest
NEEDS_WINDOW: Final = 2
EXPIRY_MARGIN: Final = 1000  # milliseconds that a key outlives its state
MANUAL_EXPIRY: Final = 3_600_000  # the same where a test moves the time: real time may pass while its own stands still
MAX_LIMITS_PER_CALL: Final = 1000  # limits in one call, since the server does nothing else meanwhile
MAX_WINDOW_RETRIES: Final = 4  # times that a call is asked again because a calendar window was missing
VERB_NUMBERS: Final = {verb: number for number, verb in enumerate(VERBS, start=1)}
ALGORITHM_NUMBERS: Final = {name: number for number, name in enumerate(ALGORITHMS, start=1)}
STATE_SIZES: Final = (0, 5, 2, 2, 4, 6, 6)  # numbers in a state of each algorithm
CALL_HEAD: Final = Struct("<5d")
SHORT_CALL: Final = Struct("<3d")
MAX_SHORT_FORM_LIMITS: Final = (
    1000  # limits that may be asked in the short form, whose answers go over Lua's stack at once
)
MAX_UNDER_WAY: Final = 8  # scripts on a connection that wait for their answer: a few milliseconds of the server's time
# What deciding on a limit costs the server, as a multiple of what it costs at a bucket (about 3 us): measured.
PRICES: Final = {
    "token_bucket": 1,
    "fixed_window": 3,
    "calendar_window": 3,
    "sliding_window": 3,
    "sliding_log": 5,
    "concurrency": 5,
}
PATIENCE: Final = 0.000_05  # seconds that a server may take for one unit of PRICES, on a slow and busy machine
ASK_STRUCTS: Final = [Struct(f"<{1 + count}d") for count in range(MAX_LIMITS_PER_CALL + 1)]
LIMIT_NUMBERS: Final = Struct("<13d")
ESCAPES: Final = str.maketrans({"%": "%25", "/": "%2F", "{": "%7B", "}": "%7D"})


class PendingCall(ABC):
    """One call: asks that are decided together, and someone who waits for the answer."""

    __slots__ = ("asks", "at", "needs", "now", "verb", "weight")

    def __init__(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> None:
        """Word the call as `Store.apply` was given it."""
        self.verb = verb
        self.asks = asks
        self.now = now
        self.at = at
        self.needs: tuple[int, ...] = ()
        self.weight = len(asks[0][0].limits)
        if len(asks) > 1:
            self.weight = sum(len(ask[0].limits) for ask in asks)
        if self.weight > MAX_LIMITS_PER_CALL:
            message = f"a call checks {self.weight} limits; at most {MAX_LIMITS_PER_CALL} are allowed: split the call"
            raise ConfigError(message)

    @property
    def dropped(self) -> bool:
        """Whether nobody needs it any more, so that it need not be sent."""
        return False

    @abstractmethod
    def settle(self, answer: list[Decision] | RateLimitError) -> None:
        """Give the answer to who waits for it."""


class Script:
    """One round trip. `full` tells to send the source along, for a server that does not know the script (any more).

    `price` is what it costs the server, in units of PRICES.
    """

    __slots__ = ("_written", "asking", "full", "groups", "price", "redirected", "slot", "wire")

    def __init__(self, wire: ScriptProtocol, groups: Sequence[PendingCall], slot: int = 0, price: int = 0) -> None:
        """Take the groups along. In a cluster, their keys are in `slot`."""
        self.wire = wire
        self.groups = groups
        self.price = price
        self.full = False
        self.slot = slot
        self.redirected = 0
        self.asking: tuple[str, int] | None = None  # a server that has the slot's keys, but not yet the slot
        self._written: tuple[list[bytes], list[bytes]] | None = None

    @property
    def patience(self) -> float:
        """How many seconds the server may take for it, beyond the timeout: it is slow because of what was asked."""
        return self.price * PATIENCE

    def needed(self) -> bool:
        """Leave out calls that were dropped before they were sent; tell whether any is left."""
        dropped = [] if self._written else [group for group in self.groups if group.dropped]
        if dropped:
            self.groups = [group for group in self.groups if not group.dropped]
            for group in dropped:
                group.settle(Closed("the call was cancelled before it was sent"))
        return bool(self.groups)

    def command(self) -> list[bytes]:
        """Give the command that runs it, word by word."""
        if self._written is None:
            self._written = self.wire.encode(self.groups)
        keys, tail = self._written
        how = [b"EVAL", self.wire.source] if self.full else [b"EVALSHA", self.wire.sha]
        return [*how, b"%d" % len(keys), *keys, *tail]

    def packed(self) -> bytes:
        """Give the command as it goes over the wire."""
        words = self.command()
        packed = b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
        return packed if self.asking is None else b"*1\r\n$6\r\nASKING\r\n" + packed

    def receive(self, reply: bytes) -> list[PendingCall]:
        """Answer everybody; give those back that must ask again because a calendar window was missing."""
        numbers = unpack(f"<{len(reply) // 8}q", reply)
        place, again = 0, []
        for group in self.groups:
            status, at = numbers[place], numbers[place + 1]
            place += 2
            if status == NEEDS_WINDOW:
                if len(group.needs) < MAX_WINDOW_RETRIES:
                    group.needs = (*group.needs, at)
                    if group.now is None and len(group.needs) == 1:
                        self.wire.learn(at)
                    again.append(group)
                else:
                    group.settle(StoreUnavailable(f"the server's clock is too far off or runs wild: it said {at} us"))
                continue
            decisions = []
            for policy, _, _ in group.asks:
                limits = policy.limits
                end = place + 3 * len(limits)
                views = [numbers[i : i + 3] for i in range(place, end, 3)]
                decisions.append(Decision((status == 1, at, limits, views, None)))
                place = end
            group.settle(decisions)
        return again

    def fail(self, error: RateLimitError) -> None:
        """Tell everybody that there is no answer."""
        for group in self.groups:
            group.settle(error)


class ScriptProtocol:
    """Knows how policies, keys and calls are written."""

    def __init__(
        self, address: RedisAddress, clock: Clock, slot: Callable[[bytes], int] | None, source: bytes = SCRIPT
    ) -> None:
        """Write for the place at `address`; `slot` tells where a cluster keeps a key."""
        self.source = source
        self.sha = sha1(source, usedforsecurity=False).hexdigest().encode()  # what EVALSHA goes by
        self.batch = address.batch
        self._clock = clock
        self._slot = slot
        self.slotted = slot is not None
        self._skew = (
            0  # how far the server's clock is ahead of ours; only which calendar windows are sent depends on it
        )
        self._plans: dict[int, EncodedPolicy] = {}
        self._start = {
            "key": f"{address.prefix}:{{",
            "policy": f"{address.prefix}:{{",
            "all": f"{{{address.prefix}}}:",
        }[address.hash_tag]
        self._hash_tag = address.hash_tag
        self._prefix = f"{{{address.prefix}}}" if address.hash_tag == "all" else address.prefix

    def marker(self, number: int | None) -> bytes:
        """Name the marker of a server (see server_watch.py); those of a cluster are numbered."""
        tag = "" if number is None else f"{{{number}}}"
        return f"{self._prefix}:marker{tag}".encode()

    def slot(self, key: bytes) -> int:
        """Tell the slot of a cluster that a key is in."""
        return 0 if self._slot is None else self._slot(key)

    def learn(self, now: int) -> None:
        """Take note of the server's time."""
        self._skew = now - self._clock.ns() // 1000

    def plan(self, policy: Policy) -> EncodedPolicy:
        """Give the written form of a policy."""
        plan = self._plans.get(id(policy))
        if plan is None:
            if len(self._plans) > MAX_LIMITS_PER_CALL:
                self._plans.clear()
            name = policy.name.translate(ESCAPES)
            before, after = f"{self._start}{name}/", ""
            if self._hash_tag == "key":
                after = "}"
            elif self._hash_tag == "policy":
                before = f"{self._start}{name}/}}"
            plan = self._plans[id(policy)] = EncodedPolicy(policy, before, after)
        return plan

    def scripts(self, groups: Sequence[PendingCall]) -> Iterator[Script]:
        """Divide groups into scripts, for a cluster each of one slot.

        None keeps the server busy for long: it has at most `batch` calls, and costs no more than that many calls to
        two buckets do, unless it is a single call that costs more.
        """
        slots: dict[int, Sequence[PendingCall]] = {0: groups}
        if self._slot is not None:
            by_slot: dict[int, list[PendingCall]] = {}
            for group in groups:
                by_slot.setdefault(self.slot_of(group), []).append(group)
            slots = dict(by_slot)
        for slot, together in slots.items():
            start, price = 0, 0
            for i, group in enumerate(together):
                more = self._price(group)
                if i > start and (price + more > 2 * self.batch or i - start >= self.batch):
                    yield Script(self, together[start:i], slot, price)
                    start, price = i, 0
                price += more
            yield Script(self, together[start:], slot, price)

    def _price(self, group: PendingCall) -> int:
        if len(group.asks) == 1:
            return self.plan(group.asks[0][0]).price
        return sum([self.plan(policy).price for policy, _, _ in group.asks])

    def slot_of(self, group: PendingCall) -> int:
        """Tell the slot of a cluster in which a call has all its keys, or refuse it."""
        if self._slot is None:
            return 0
        slots = {self._slot(self.plan(policy).key(key)) for policy, key, _ in group.asks}
        if len(slots) > 1:
            message = (
                "a cluster decides together only what it keeps together, and these keys are apart: open the store with "
                "?hash_tag=policy (all keys of a policy in one slot) or ?hash_tag=all (everything in one slot)"
            )
            raise ConfigError(message)
        return slots.pop()

    def encode(self, groups: Sequence[PendingCall]) -> tuple[list[bytes], list[bytes]]:
        """Write groups as the keys and arguments of core.lua."""
        usual = self._encode_usual(groups)
        if usual is not None:
            return usual
        places: dict[bytes, int] = {}
        keys: list[bytes] = []
        asked = []
        for group in groups:
            now, at, asks = group.now, group.at, group.asks
            asked.append(
                CALL_HEAD.pack(
                    VERB_NUMBERS[group.verb],
                    NO_INSTANT if now is None else now,
                    EXPIRY_MARGIN if now is None else MANUAL_EXPIRY,
                    NO_INSTANT if at is None else at,
                    len(asks),
                )
            )
            for policy, key, costs in asks:
                plan = self.plan(policy)
                written = plan.written or self._with_windows(plan, group)
                place = places.setdefault(written, len(places) + 1)
                asked.append(ASK_STRUCTS[len(costs)].pack(place, *costs))
                name = plan.key(key)
                keys.append(name)
                if plan.logs:
                    keys.extend([name + log for log in plan.logs])
        return keys, [b"".join(asked), *places]

    def _encode_usual(self, groups: Sequence[PendingCall]) -> tuple[list[bytes], list[bytes]] | None:
        """Write groups shortly that all acquire from buckets, at one key each, at the same instant; else None."""
        places: dict[bytes, int] = {}
        keys: list[bytes] = []
        now = groups[0].now
        asked = [
            SHORT_CALL.pack(0, NO_INSTANT, EXPIRY_MARGIN) if now is None else SHORT_CALL.pack(0, now, MANUAL_EXPIRY)
        ]
        plans = self._plans
        for group in groups:
            if group.verb != "acquire" or len(group.asks) != 1 or group.now != now or group.at is not None:
                return None
            policy, key, costs = group.asks[0]
            plan = plans.get(id(policy)) or self.plan(policy)
            if not plan.buckets:
                return None
            asked.append(plan.usual(places.setdefault(plan.written, len(places) + 1), costs))
            keys.append(plan.key(key))
        if sum([group.weight for group in groups]) > MAX_SHORT_FORM_LIMITS:
            return None
        return keys, [b"".join(asked), *places]

    def _with_windows(self, plan: EncodedPolicy, group: PendingCall) -> bytes:
        now = group.now if group.now is not None else self._clock.ns() // 1000 + self._skew
        return plan.at(now, group.needs)


class EncodedPolicy:
    """A policy as it is written. `written` is empty where calendar windows make it depend on the time."""

    __slots__ = (
        "_after",
        "_before",
        "_recent",
        "_since",
        "_until",
        "_usual",
        "buckets",
        "logs",
        "policy",
        "price",
        "written",
    )

    def __init__(self, policy: Policy, before: str, after: str) -> None:
        """Work out what does not change. A key stands between `before` and `after`."""
        self.policy = policy  # kept, so that its id() is not given to another
        self._before = before
        self._after = after
        self.logs = [b":%x" % limit_id(limit) for limit in policy.limits if ALGORITHM_NUMBERS[limit.algorithm] >= 5]  # noqa: PLR2004 - the two that log
        self.buckets = all(limit.algorithm == "token_bucket" for limit in policy.limits)
        self.price = sum(PRICES[limit.algorithm] for limit in policy.limits)
        self.written = b""
        self._recent, self._since, self._until = b"", 0, 0
        self._usual: dict[tuple[int, tuple[int, ...]], bytes] = {}
        if all(limit.calendar is None for limit in policy.limits):
            self.written = b"".join(write_limit(limit, ()) for limit in policy.limits)

    def usual(self, place: int, costs: tuple[int, ...]) -> bytes:
        """Write a usual call for these costs."""
        written = self._usual.get((place, costs))
        if written is None:
            written = ASK_STRUCTS[len(costs)].pack(place, *costs)
            if len(self._usual) < MAX_LIMITS_PER_CALL:
                self._usual[place, costs] = written
        return written

    def key(self, key: Key) -> bytes:
        """Name the entry of a key."""
        if not isinstance(key, str):
            key = "/".join([part.translate(ESCAPES) for part in key])
        elif "/" in key or "%" in key or "{" in key or "}" in key:
            key = key.translate(ESCAPES)
        return f"{self._before}{key}{self._after}".encode("utf-8", "surrogatepass")

    def at(self, now: int, needs: tuple[int, ...]) -> bytes:
        """Write the policy with the calendar windows around `now`, and around what else is needed."""
        if not needs and self._since <= now < self._until:
            return self._recent
        written = b"".join(write_limit(limit, (now, *needs)) for limit in self.policy.limits)
        if not needs:
            around = [limit.calendar.window(now) for limit in self.policy.limits if limit.calendar]
            self._recent = written
            self._since, self._until = max(start for start, _ in around), min(end for _, end in around)
        return written


def write_limit(limit: Limit, instants: tuple[int, ...]) -> bytes:
    """Write the numbers of a limit, with the calendar windows before, at and after some instants."""
    windows: list[int] = []
    if limit.calendar is not None:
        spans: dict[int, int] = {}
        for instant in instants:
            start, end = limit.calendar.window(instant)
            before, after = limit.calendar.window(start - 1), limit.calendar.window(end)
            spans.update({start: end, before[0]: before[1], after[0]: after[1]})
        windows = [bound for span in spans.items() for bound in span]
    algorithm = ALGORITHM_NUMBERS[limit.algorithm]
    numbers = LIMIT_NUMBERS.pack(
        STATE_SIZES[algorithm],
        limit_id(limit),
        owner_id(limit),
        limit.scale,
        limit.rate,
        limit.capacity,
        algorithm,
        limit.quota,
        limit.length,
        limit.burst,
        limit.floor,
        limit.tick,
        len(windows),
    )
    return numbers + Struct(f"<{len(windows)}d").pack(*windows)


def limit_id(limit: Limit) -> int:
    """Give the number under which the store knows a limit: of its name and algorithm. Below 2**52."""
    return _digest(limit.name) * 8 + ALGORITHM_NUMBERS[limit.algorithm]


def owner_id(limit: Limit) -> int:
    """Give the number of everything that makes a limit what it is: changed, it has another one. Below 2**48."""
    return _digest(repr(limit))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=6).digest(), "big")
