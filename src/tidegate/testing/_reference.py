"""ReferenceStore: the core over a dictionary, with the answers that every store must give."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidegate.core._decision import VERBS
from tidegate.core.codec import limit_of
from tidegate.stores._base import Alternatives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Key, Policy
    from tidegate.core._algorithms import State, View
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask

    Place = tuple[str, Key, str, str]


class ExpectedAnswer(NamedTuple):
    """The answer to one ask: allowed, the instant, and the view of each limit."""

    allowed: bool
    at: int
    views: tuple[View, ...]


def answer_of(decision: Decision) -> ExpectedAnswer:
    """Return a Decision as plain data."""
    return ExpectedAnswer(decision.allowed, decision.at, tuple(decision.views))


class ReferenceStore:
    """A store with only the core in it: no lock, no bound, no clean-up; for one thread."""

    def __init__(self) -> None:
        """Create an empty store."""
        self._states: dict[Place, State] = {}

    def apply(self, verb: str, asks: Sequence[Ask], now: int, at: int | None = None) -> tuple[ExpectedAnswer, ...]:
        """Apply the verb to every (policy, key, costs) together; `Store.apply` must answer the same."""
        if isinstance(asks, Alternatives):
            found: tuple[ExpectedAnswer, ...] = ()
            for alternative in asks.groups():
                found += self.apply(verb, alternative, now, at)
                if found[-1].allowed:
                    break
            return found
        limits = [limit for policy, _, _ in asks for limit in policy.limits]
        places = [place for policy, key, _ in asks for place in _places(policy, key)]
        costs = [cost for _, _, costs in asks for cost in costs]
        states = [self._states.get(place) for place in places]
        allowed, changed, left = VERBS[verb].decide(limits, states, costs, now, at)
        triples = zip(limits, changed, left, strict=True)
        views = [limit.rules.view(state, limit, cost, now) for limit, state, cost in triples]
        if verb != "peek":
            self._keep(places, changed)
        if verb == "reset":
            for policy, key, _ in asks:
                self._clear(policy, key)
        answers, start = [], 0
        for policy, _, _ in asks:
            end = start + len(policy.limits)
            answers.append(ExpectedAnswer(allowed, now, tuple(views[start:end])))
            start = end
        return tuple(answers)

    def _keep(self, places: list[Place], states: Sequence[State | None]) -> None:
        for place, state in zip(places, states, strict=True):
            if state is None:
                self._states.pop(place, None)
            else:
                self._states[place] = state

    def _clear(self, policy: Policy, key: Key) -> None:
        """Clear a key of a policy, also the states of limits that the policy no longer has."""
        for place in [place for place in self._states if place[:2] == (policy.name, key)]:
            del self._states[place]

    def last_end(self, now: int) -> int:
        """Return the latest instant up to now at which a state expired: a store may have dropped it since."""
        ends = [limit_of(state).rules.expires(state) for state in self._states.values()]
        return max((end for end in ends if end <= now), default=0)


def _places(policy: Policy, key: Key) -> list[Place]:
    return [(policy.name, key, *limit.identity) for limit in policy.limits]
