"""Who else shares a policy, what each may spend when it is cut off, and whether somebody is.

No process can ask another whether it still sees the store, and a store that one process has lost may serve the others.
So that they never admit more than the limit together, whoever is cut off:

- The limit has two halves: one for those who see the store and one for those who do not. While everybody is known to
  see it, the store grants all of it. While somebody may not, calls to the store cost double.
- The second half is shared out ahead. A process **claims** a part of it, for one *term* at a time, by an ordinary
  decision of the engine: a window of UNITS permits that all claims together cannot exceed.
- Every *beat* a process **posts** that it is there, and looks who was there in the beat before. Everybody who has a
  claim is known by a random number; the claims and the posts of a beat name the same processes if their sums are equal.
- A look at beat k is relied upon until beat k + 3. It shows the posts of beat k - 1. So a process that last posted in
  beat p is counted on by nobody from beat p + 4 on: only from then may it spend, if it was cut off, and only what will
  have come back to the limit before its claims end.
- A process that comes back asks the store at double cost, charges there what it has spent, and posts only then.

Beats and terms are those of the server's clock. Keys carry their number, so a message that is late by any time lands
where nobody looks any more. What is in doubt (an answer that got lost) counts against its process: a post may have been
seen, a claim may not have been granted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tidegate.core.limit import Limit
from tidegate.policy import Policy

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key

WHOLE_LIMIT: Final = (
    2 * 720_720
)  # a limit, in the units that claims are made of: up to 16 equal claims leave nothing over
CLAIMABLE_UNITS: Final = WHOLE_LIMIT // 2  # what can be claimed: the half of those who do not see the store
RELIED_BEATS: Final = 3  # beats for which a look is relied upon


class AskStore(Protocol):
    """Asks the store itself, within its deadline."""

    def __call__(self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None) -> Decision:
        """Apply a verb at one key."""


class Peers:
    """One process among those that share a policy. All instants are the server's, in microseconds."""

    def __init__(self, name: str, number: int, beat: int, term: int) -> None:
        """Share the policy of this name, known to the others by a number; nothing is claimed yet."""
        self.name = name
        self.number = number
        self.beat = beat
        self.term = term
        self.claims: dict[int, int] = {}  # units, by the number of the term
        self.posted = -1  # the last beat in which anything was sent that others may rely on
        self.processes = 1
        self.complete_until = 0  # until when everybody who has a claim is known to see the store
        self._tried = -1  # the last term for which a claim was attempted
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
    def free_from(self) -> int:
        """From when on nobody counts on this process any more, should it post nothing further."""
        return (self.posted + 1 + RELIED_BEATS) * self.beat

    def due(self) -> int:
        """Tell when the next turn is due: early in the next beat, not all processes at once."""
        return (self.posted + 1) * self.beat + self.number % (self.beat // 4)

    def held(self, since: int) -> tuple[int, int]:
        """Tell what a process may spend that is cut off since an instant, and until when: the least of its claims."""
        first = since // self.term
        units = self.claims.get(first, 0)
        if not self.claims.get(first + 1):
            return units, (first + 1) * self.term
        return min(units, self.claims[first + 1]), (first + 2) * self.term

    def turn(self, ask: AskStore, now: int) -> None:
        """Take part in the beat around now, once: look, claim, post."""
        beat, term = now // self.beat, now // self.term
        if beat <= self.posted:
            return
        self._look(ask, beat, term)
        self.posted = beat  # before anything is sent: what gets lost on its way may have arrived
        self._claim(ask, term, now)
        held, ahead = (self.number if self.claims.get(t) else 0 for t in (term, term + 1))
        ask("acquire", self._posts, (self.name, str(beat)), (1, held, ahead))

    def leave(self, ask: AskStore) -> None:
        """Give the claims back: nobody needs to wait for this process."""
        claims, self.claims = self.claims, {}
        for term, units in claims.items():
            ask("adjust", self._claims, (self.name, str(term)), (-units, -self.number))

    def _look(self, ask: AskStore, beat: int, term: int) -> None:
        """See whether everybody who has a claim posted in the beat before.

        Posts first: a claim made between the two looks then is one too many, never one too few.
        """
        processes, held, ahead = used(ask("peek", self._posts, (self.name, str(beat - 1)), (0, 0, 0)))
        if (beat - 1) * self.beat // self.term != term:
            held, ahead = ahead, 0
        self.processes = max(1, processes)
        if all(
            used(ask("peek", self._claims, (self.name, str(number)), (0, 0)))[1] == posted
            for number, posted in ((term, held), (term + 1, ahead))
        ):
            self.complete_until = (beat + RELIED_BEATS) * self.beat

    def _claim(self, ask: AskStore, term: int, now: int) -> None:
        """Claim a part of the term that runs, when new, and from its middle on of the next."""
        self.claims = {number: units for number, units in self.claims.items() if number >= term}
        if self._tried < term:
            free = CLAIMABLE_UNITS - used(ask("peek", self._claims, (self.name, str(term)), (0, 0)))[0]
            self._take(ask, term, free // 2)  # others may follow
        if self._tried == term and 2 * now >= (2 * term + 1) * self.term:
            self._take(ask, term + 1, CLAIMABLE_UNITS // self.processes)

    def _take(self, ask: AskStore, term: int, units: int) -> None:
        self._tried = term
        if not units:
            return
        decision = ask("acquire", self._claims, (self.name, str(term)), (units, self.number))
        if decision.allowed:
            self.claims[term] = units
        else:  # others count differently: half of what they left, or half of that
            self._take(ask, term, min(units, CLAIMABLE_UNITS - used(decision)[0]) // 2)


def used(decision: Decision) -> list[int]:
    """Read how much of each limit is used."""
    return [limit.quota - view[0] for limit, view in zip(decision[2], decision.views, strict=True)]
