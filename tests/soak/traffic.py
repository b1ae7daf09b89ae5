"""The mixed traffic of the soak: what one client asks, drawn from a seeded random source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from tests.soak.connection import Connection, Reply

QUOTA: Final = 24
QUEUED: Final = 6
SLOTS: Final = 8
LEASED: Final = 400
# Windows are longer than any run, and the bucket refills nothing in one: what was charged stays charged.
POLICIES: Final = {
    "window": f"{QUOTA}/1d fixed_window",
    "log": f"{QUOTA}/1d sliding_log",
    "bucket": f"1/365d burst={QUOTA}",
    "both": f"[{QUOTA}/1d fixed_window name=first, {QUOTA + 6}/1d sliding_log name=second]",
    "queue": f"{QUEUED}/1d fixed_window",
    "slots": f"{SLOTS}/1d concurrency",
    "leased": f"{LEASED}/1d fixed_window",
    "local": f"{{limits: {QUOTA}/1m, on_store_error: local}}",
}
LOWERED: Final = {"window": f"{QUOTA // 2}/1d fixed_window", "log": f"{QUOTA // 2}/1d sliding_log"}
USUAL: Final = ("window", "log", "bucket", "both")  # policies of most calls
# How many keys of each policy the kinds of calls have in a round: few enough for quotas to be used up.
KEYS: Final = {"plain": 2, "waiting": 2, "check": 1, "batch": 2, "reserve": 1, "keyed": 1, "slots": 3, "local": 1}
MAX_WAIT: Final = 0.25  # seconds


# The most permits of a key at a time.
QUOTAS: Final = {
    **dict.fromkeys((*USUAL, "local"), QUOTA),
    "queue": QUEUED,
    "slots": SLOTS,
    "leased": LEASED,
}


class RawClient:
    """One client on connections of its own. It hangs up on some of its questions."""

    def __init__(self, connection: Connection, draw: random.Random, round_number: int) -> None:
        self._connection = connection
        self._draw = draw
        self._round = round_number
        self._slots: list[str] = []  # keys at which it holds a slot
        self.statuses: dict[int, int] = {}
        self.faults: list[str] = []  # answers that can never be right
        self._actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self.acquire),
            (12, self.acquire_waiting),
            (8, self.acquire_slot),
            (6, self.release_slot),
            (8, self.check),
            (10, self.batch),
            (14, self.reserve),
            (8, self.repeat),
            (4, self.peek),
            (4, self.acquire_local),
            (2, self.look),
        ]

    async def step(self) -> None:
        """Ask one thing, and what follows from it."""
        weights, actions = zip(*self._actions, strict=True)
        await self._draw.choices(actions, weights)[0]()
        if self._draw.random() < 0.1:
            self._connection.close()  # so that another process of the service gets its share

    # ---- actions -----------------------------------------------------------------------------------------------------

    async def acquire(self) -> None:
        await self._post("acquire", self._subject("plain"), give_up=self._patience())

    async def acquire_waiting(self) -> None:
        """Wait for a permit; some leave the queue before. Reservations are cancelled meanwhile."""
        subject = {"policy": "queue", "key": self._key("waiting"), "cost": self._draw.randint(1, 2)}
        if self._draw.random() < 0.4:
            await self._reserve(subject, give_up=None)
            return
        timeout = self._draw.uniform(0.01, MAX_WAIT)
        give_up = self._draw.uniform(0, timeout) if self._draw.random() < 0.5 else None
        await self._post("acquire", {**subject, "timeout": timeout}, give_up=give_up)

    async def acquire_slot(self) -> None:
        key = self._key("slots")
        body = {"policy": "slots", "key": key, "timeout": self._draw.choice((0, MAX_WAIT / 2))}
        reply = await self._post("acquire", body, give_up=self._patience())
        if reply is not None and reply.status == 200 and reply.body["allowed"]:
            self._slots.append(key)

    async def release_slot(self) -> None:
        if self._slots:
            key = self._slots.pop(self._draw.randrange(len(self._slots)))
            await self._post("release", {"policy": "slots", "key": key})

    async def check(self) -> None:
        self._note(await self._connection.check(**self._subject("check"), give_up=self._patience()))

    async def batch(self) -> None:
        asks = [self._subject("batch") for _ in range(self._draw.randint(2, 8))]
        await self._post("batch", {"asks": asks}, give_up=self._patience())

    async def reserve(self) -> None:
        """Reserve; some hang up."""
        body = {**self._subject("reserve"), "cost": self._draw.randint(1, 4)}
        if self._draw.random() < 0.3:
            body["timeout"] = MAX_WAIT / 2
        await self._reserve(body, give_up=self._patience())

    async def _reserve(self, body: dict[str, Any], give_up: float | None) -> None:
        """Reserve; then commit what it cost, cancel, or leave the estimate as it is."""
        reply = await self._post("reserve", body, give_up=give_up)
        number = reply.body["id"] if reply is not None and reply.status == 200 else None
        if number is None:
            return
        kind = self._draw.random()
        if kind < 0.4:
            await self._post("commit", {"id": number, "cost": self._draw.randint(0, body["cost"])})
        elif kind < 0.8:
            await self._post("cancel", {"id": number})

    async def repeat(self) -> None:
        """Ask with an idempotency key, and again, or hang up.

        The process that answered first repeats its answer word for word. Another one, which is asked if the first was
        killed, gives the same decision with what remains by now.
        """
        body = self._subject("keyed")
        name = f"{self._draw.getrandbits(64):x}"
        give_up = self._patience()
        first = await self._post("acquire", body, give_up=give_up, key=name)
        if give_up is not None or first is None or first.status != 200:
            return
        number = self._connection.opened
        again = await self._post("acquire", body, key=name)
        if again is None or "idempotency-replayed" not in again.headers:
            return
        same = again.body == first.body if number == self._connection.opened else again.body["allowed"]
        if not same:
            self.faults.append(f"the same idempotency key got {first.body} and then {again.body}")

    async def peek(self) -> None:
        await self._post("peek", self._subject("plain"))

    async def acquire_local(self) -> None:
        await self._post("acquire", {"policy": "local", "key": self._key("local")}, give_up=self._patience())

    async def look(self) -> None:
        self._note(await self._connection.get(self._draw.choice(("/metrics", "/v1/overview", "/v1/policies"))))

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()

    # ---- what they share ---------------------------------------------------------------------------------------------

    def _subject(self, group: str) -> dict[str, Any]:
        cost = self._draw.choice((1, 1, 1, 2, 3))
        return {"policy": self._draw.choice(USUAL), "key": self._key(group), "cost": cost}

    def _key(self, group: str) -> str:
        """Draw a key. Each kind of call has keys of its own, so that what is wrong with a key says where to look."""
        return f"{group}:{self._round}:{self._draw.randrange(KEYS[group])}"

    def _patience(self) -> float | None:
        """Draw after how many seconds it hangs up; None: it does not."""
        return self._draw.choice((0, 0.001, 0.003, 0.01)) if self._draw.random() < 0.25 else None

    async def _post(self, verb: str, body: dict[str, Any], **options: Any) -> Reply | None:
        reply = await self._connection.post(verb, body, **options)
        self._note(reply)
        return reply

    def _note(self, reply: Reply | None) -> None:
        if reply is None:
            return
        self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
        if reply.status == 500:
            self.faults.append(f"status 500: {reply.body}")
