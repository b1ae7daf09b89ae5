"""What a request to the service may charge or give back, and what its answer says about that.

Pure functions, shared by the clients in the soak's own process and those in processes that are killed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

Account = tuple[str, str]  # the name of a policy, and a key

CHARGES: Final = ("acquire", "reserve")
SETTLES: Final = ("commit", "cancel", "release")
WAITING: Final = " waiting"
# Problems that the service answers before it asks the store: nothing was charged or given back.
REFUSED: Final = ("busy", "stopping")


class Effect(NamedTuple):
    """A change of an account: above 0 permits are charged, below 0 they are given back."""

    account: Account
    amount: int


def expected_effects(verb: str, body: dict[str, Any], held: dict[str, Effect]) -> list[Effect]:
    """List the largest effects that a request may have; `held` has the charge of each reservation id."""
    if verb in CHARGES:
        return [Effect(account_of(body), body.get("cost", 1))]
    if verb == "lease":
        return [Effect(account_of(body), max(body.get("cost", 1), body.get("max_permits", 1)))]
    if verb == "batch":
        asks = body.get("asks") or [{"policy": body["policy"], "key": key} for key in body["keys"]]
        return [Effect(account_of(ask), ask.get("cost", 1)) for ask in asks]
    if verb == "release":
        return [Effect(account_of(body), -body.get("cost", 1))]
    if verb in SETTLES and body["id"] in held:
        account, estimate = held[body["id"]]
        return [Effect(account, body.get("cost", estimate) - estimate if verb == "commit" else -estimate)]
    return []


def label_of(verb: str, body: dict[str, Any]) -> str:
    """Name a request in a journal; one that may wait asks the store again and again."""
    return f"{verb}{WAITING}" if body.get("timeout") else verb


def account_of(body: dict[str, Any]) -> Account:
    """Read whom a request is about; the soak's keys are single strings."""
    return body["policy"], body["key"]


def actual_effects(verb: str, expected: list[Effect], status: int, answer: Any) -> list[int | None]:
    """Read the amount of each expected effect from an answer; None: the answer does not tell."""
    if status != 200:
        return [effect_of_problem(status, answer)] * len(expected)
    if verb in SETTLES:
        return [effect.amount for effect in expected]
    if verb == "batch":
        return [effect_of_one(effect, each) for effect, each in zip(expected, answer["answers"], strict=True)]
    if verb == "lease" and answer["id"] is not None:
        return [answer["permits"]]
    return [effect_of_one(effect, answer) for effect in expected]


def effect_of_one(effect: Effect, answer: dict[str, Any]) -> int | None:
    """Read one decision, or the problem in its place in a batch."""
    if "error" in answer:
        return effect_of_problem(answer["error"]["status"], answer["error"])
    return effect.amount if answer["allowed"] else 0


def effect_of_problem(status: int, answer: Any) -> int | None:
    """Tell what a problem leaves behind: nothing if the request was refused; None if the store may have acted."""
    if status < 500:
        return 0
    kind = answer.get("type", "") if isinstance(answer, dict) else ""
    return 0 if kind.rpartition(":")[2] in REFUSED else None
