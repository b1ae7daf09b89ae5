"""Which processes share a policy, what each may spend when disconnected, and whether one is disconnected.

A process cannot know whether another one still reaches the store, and a store that one process cannot reach may serve
the others. Together they must never admit more than the limit, whichever of them are disconnected:

- The limit has two halves: one for processes that reach the store and one for processes that do not. While all of them
  are known to reach the store, it grants the whole limit. Otherwise calls to the store cost double.
- The second half is divided in advance. A process **claims** a part of it, for one *term* at a time, by an ordinary
  decision of the engine: a window of CLAIMABLE_UNITS permits that all claims together cannot exceed.
- In every *beat* a process **posts** a heartbeat and reads the posts of the beat before. Each process that has a claim
  is identified by a random number; the claims and the posts of a beat name the same processes if their sums are equal.
- A check at beat k is relied upon until beat k + 3. It reads the posts of beat k - 1. So from
  beat p + 4 on, no process relies on one that last posted in beat p. Only from then on may a disconnected process spend
  its share, and only the part that the limit will have refilled before its claims end.
- A process that reaches the store again asks it at double cost, charges what it has spent, and only then posts.

Beats and terms follow the server's clock. Keys contain their number, so a message that arrives late changes a key that
is no longer read. If an answer is lost, a process assumes the worse case: its post was read, or its claim was not
granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tidegate.core.limit import Limit
from tidegate.policy import Policy

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key

WHOLE_LIMIT: Final = 2 * 720_720  # a limit in the units of claims: divisible by up to 16 equal claims
CLAIMABLE_UNITS: Final = WHOLE_LIMIT // 2  # the half for processes that do not reach the store
RELIED_BEATS: Final = 3  # beats for which a check of the peers is relied upon


class AskStore(Protocol):
    """Calls the store itself, within its deadline."""

    def __call__(self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None) -> Decision:
        """Apply a verb at one key."""


class Peers:
    """One of the processes that share a policy. All instants are the server's, in microseconds."""

    def __init__(self, name: str, number: int, beat: int, term: int) -> None:
        """Share the policy of this name. `number` identifies this process; nothing is claimed yet."""
        self.name = name
        self.number = number
        self.beat = beat
        self.term = term
        self.claims: dict[int, int] = {}  # units, by the number of the term
        self.posted: int = -1  # the last beat in which anything was sent that other processes may rely on
        self.processes: int = 1
        self.all_connected_until: int = 0  # until when all processes with a claim are known to reach the store
        self._attempted_term = -1  # the last term for which a claim was attempted
        window = f"{3 * term // 1000}ms"
        self._claims = Policy(
            "tidegate.claims",
            (
                Limit(CLAIMABLE_UNITS, window, algorithm="fixed_window", unit="units", name="units"),
                Limit(2**52, window, algorithm="fixed_window", unit="numbers", name="numbers"),
            ),
        )
        window = f"{10 * beat // 1000}ms"
        self._posts = Policy(
            "tidegate.posts",
            tuple(
                Limit(2**52, window, algorithm="fixed_window", unit=unit, name=unit)
                for unit in ("processes", "term", "next-term")
            ),
        )

    @property
    def relied_until(self) -> int:
        """When the other processes stop relying on this one, if it posts nothing more."""
        return (self.posted + 1 + RELIED_BEATS) * self.beat

    def due(self) -> int:
        """Return when to call `sync` next: early in the next beat, at a different time for each process."""
        return (self.posted + 1) * self.beat + self.number % (self.beat // 4)

    def claimed_share(self, since: int) -> tuple[int, int]:
        """Return how many units this process may spend if disconnected since an instant, and until when."""
        first = since // self.term
        units = self.claims.get(first, 0)
        if not self.claims.get(first + 1):
            return units, (first + 1) * self.term
        return min(units, self.claims[first + 1]), (first + 2) * self.term

    def sync(self, ask: AskStore, now: int) -> None:
        """Check the peers, claim and post, once in the current beat."""
        beat, term = now // self.beat, now // self.term
        if beat <= self.posted:
            return
        self._check_peers(ask, beat, term)
        self.posted = beat  # before anything is sent: a call without an answer may have arrived
        self._claim(ask, term, now)
        current, ahead = (self.number if self.claims.get(t) else 0 for t in (term, term + 1))
        ask("acquire", self._posts, (self.name, str(beat)), (1, current, ahead))

    def leave(self, ask: AskStore) -> None:
        """Return the claims, so that no process waits for this one."""
        claims, self.claims = self.claims, {}
        for term, units in claims.items():
            ask("adjust", self._claims, (self.name, str(term)), (-units, -self.number))

    def _check_peers(self, ask: AskStore, beat: int, term: int) -> None:
        """Check whether all processes with a claim posted in the beat before.

        Posts are read first: a claim made between the two reads then is one too many, never one too few.
        """
        processes, current, ahead = read_used(ask("peek", self._posts, (self.name, str(beat - 1)), (0, 0, 0)))
        if (beat - 1) * self.beat // self.term != term:
            current, ahead = ahead, 0
        self.processes = max(1, processes)
        if all(
            read_used(ask("peek", self._claims, (self.name, str(number)), (0, 0)))[1] == posted
            for number, posted in ((term, current), (term + 1, ahead))
        ):
            self.all_connected_until = (beat + RELIED_BEATS) * self.beat

    def _claim(self, ask: AskStore, term: int, now: int) -> None:
        """Claim a part of the current term, once, and from its middle on a part of the next."""
        self.claims = {number: units for number, units in self.claims.items() if number >= term}
        if self._attempted_term < term:
            free = CLAIMABLE_UNITS - read_used(ask("peek", self._claims, (self.name, str(term)), (0, 0)))[0]
            self._try_claim(ask, term, free // 2)  # other processes may follow
        if self._attempted_term == term and 2 * now >= (2 * term + 1) * self.term:
            self._try_claim(ask, term + 1, CLAIMABLE_UNITS // self.processes)

    def _try_claim(self, ask: AskStore, term: int, units: int) -> None:
        self._attempted_term = term
        if not units:
            return
        decision = ask("acquire", self._claims, (self.name, str(term)), (units, self.number))
        if decision.allowed:
            self.claims[term] = units
        else:  # other processes claimed more: try half of what is left, then half of that
            self._try_claim(ask, term, min(units, CLAIMABLE_UNITS - read_used(decision)[0]) // 2)


def read_used(decision: Decision) -> list[int]:
    """Return how much of each limit is used."""
    return [limit.quota - view[0] for limit, view in zip(decision.policy_limits, decision.views, strict=True)]
