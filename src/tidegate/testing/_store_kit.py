"""verify_store: the conformance test for stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidegate._policy import Policy
from tidegate._runtime.clock import SystemClock
from tidegate.core._bounds import SECOND
from tidegate.errors import StoreUnavailable
from tidegate.stores._base import Store
from tidegate.testing._reference import ExpectedAnswer, ReferenceStore, answer_of
from tidegate.testing._store_guarantees import GUARANTEES
from tidegate.testing._value_guarantees import VALUE_GUARANTEES
from tidegate.testing._vectors import Vector, random_vectors

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask

OpenStore = Callable[[], Store]

ROUND_LENGTH = 120  # vectors per round
MAX_SHORTER_HISTORIES = 400  # shorter histories to try before a failure is reported


def verify_store(
    open_store: OpenStore,
    *,
    seed: int = 0,
    rounds: int = 20,
    frozen: Callable[[], AbstractContextManager[object]] | None = None,
    deadline: float = 1.0,
) -> None:
    """Test a store; raise AssertionError with the violated guarantee, the seed and the steps that reproduce it.

    `open_store()` returns a new, empty store; the stores are closed at the end. First each guarantee of a Store is
    tested by name (all or nothing, a denied call changes nothing, …), with those of small values if it keeps them. Then
    `rounds` random histories are replayed by `apply`, `apply_one` and `apply_async`, and every answer is compared with
    that of `ReferenceStore`. Every instant is passed to the store; histories begin in 2024 or 2025 and may cover
    decades. A failing history is shortened before it is reported. Makes about 4,500 calls by default.

    A store on a server bounds its calls itself. To test this, pass `frozen`: a function that returns a context manager
    in which the server does not respond (SIGSTOP will do). Calls must then raise StoreUnavailable within `deadline`
    seconds, also from tasks, whose event loop must not be blocked; and they must work again afterwards.
    """
    alternatives = keeps_values = False
    for guarantee in GUARANTEES:
        with _opened(open_store) as store:
            alternatives, keeps_values = store.decides_alternatives, store.keeps_values
            _check(guarantee, store)
    for guarantee in VALUE_GUARANTEES if keeps_values else ():
        with _opened(open_store) as store:
            _check(guarantee, store)
    if frozen is not None:
        _check(answers_within_the_deadline, open_store, frozen, deadline)
    for number in range(rounds):
        vectors = list(random_vectors(seed * 1_000_003 + number, ROUND_LENGTH, alternatives=alternatives))
        if number % 4:
            with _opened(open_store) as store:
                failed = _replay(store, vectors)
        else:
            failed = _run(_replay_async(open_store, vectors))
        if failed is not None:
            history = _shorten(open_store, vectors[: failed + 1])
            raise AssertionError(_failure_message(seed, number, failed, vectors[failed], history))


def _check(guarantee: Callable[..., None], *arguments: object) -> None:
    try:
        guarantee(*arguments)
    except AssertionError as broken:
        name = guarantee.__name__.replace("_", " ")
        raise AssertionError(f"the store violates a guarantee: {name}\n{guarantee.__doc__}\n{broken}") from None


def answers_within_the_deadline(
    open_store: OpenStore, frozen: Callable[[], AbstractContextManager[object]], deadline: float
) -> None:
    """While the server does not respond, a call raises StoreUnavailable in time; afterwards calls work again."""
    with _opened(open_store) as store:
        policy = Policy("frozen", ("1000000/1h",))
        ask = (policy, "k", (1,))
        store.apply("acquire", (ask,))
        with frozen():
            _expect_outage(store, ask, deadline)
            _run(_expect_outage_async(store, ask, deadline))
        store.apply("acquire", (ask,))


def _expect_outage(store: Store, ask: Ask, deadline: float) -> None:
    began = SystemClock.steady()
    try:
        store.apply("acquire", (ask,))
    except StoreUnavailable:
        took = (SystemClock.steady() - began) / SECOND
        if took > deadline:
            raise AssertionError(f"apply took {took:.2f} s, the deadline is {deadline} s") from None
    else:
        raise AssertionError("apply returned while the server was frozen")


async def _expect_outage_async(store: Store, ask: Ask, deadline: float) -> None:
    call = asyncio.ensure_future(store.apply_async("acquire", (ask,)))
    began = SystemClock.steady()
    await asyncio.sleep(0)
    blocked = (SystemClock.steady() - began) / SECOND
    if blocked > deadline / 2:
        raise AssertionError(f"apply_async blocked the event loop for {blocked:.2f} s")
    try:
        await asyncio.wait_for(call, deadline)
    except StoreUnavailable:
        return
    except TimeoutError:
        raise AssertionError(f"apply_async did not end within {deadline} s") from None
    raise AssertionError("apply_async returned while the server was frozen")


@contextmanager
def _opened(open_store: OpenStore) -> Iterator[Store]:
    store = open_store()
    try:
        yield store
    finally:
        store.close()


def _replay(store: Store, vectors: Sequence[Vector]) -> int | None:
    """Replay vectors; return the index of the first with a different answer."""
    for place, vector in enumerate(vectors):
        verb, asks, now, at, answers = vector
        if len(asks) == 1 and place % 2:
            decisions = [store.apply_one(verb, *asks[0], now, at)]
        else:
            decisions = store.apply(verb, asks, now, at)
        if _read(decisions) != answers:
            return place
    return None


async def _replay_async(open_store: OpenStore, vectors: Sequence[Vector]) -> int | None:
    store = open_store()
    try:
        for place, (verb, asks, now, at, answers) in enumerate(vectors):
            if _read(await store.apply_async(verb, asks, now, at)) != answers:
                return place
    finally:
        await store.close_async()
    return None


def _run(coroutine: Coroutine[None, None, int | None]) -> int | None:
    """Run a coroutine to its end, even if an event loop is already running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _read(decisions: Sequence[Decision]) -> tuple[ExpectedAnswer, ...]:
    return tuple(answer_of(decision) for decision in decisions)


def _shorten(open_store: OpenStore, vectors: Sequence[Vector]) -> list[tuple[Vector, tuple[ExpectedAnswer, ...]]]:
    """Remove steps while the last answer is still wrong; return the rest, with the answers of the store."""
    steps = list(vectors)
    for place, _ in zip(range(len(steps) - 2, -1, -1), range(MAX_SHORTER_HISTORIES), strict=False):
        fewer = [*steps[:place], *steps[place + 1 :]]
        if _replay_failing(open_store, fewer):
            steps = fewer
    return _replay_failing(open_store, steps) or []


def _replay_failing(
    open_store: OpenStore, steps: Sequence[Vector]
) -> list[tuple[Vector, tuple[ExpectedAnswer, ...]]] | None:
    """Replay steps with recomputed answers; return all of them if the last answer is wrong."""
    model, history = ReferenceStore(), []
    with _opened(open_store) as store:
        for verb, asks, now, at, _ in steps:
            vector = Vector(verb, asks, now, at, model.apply(verb, asks, now, at))
            history.append((vector, _read(store.apply(verb, asks, now, at))))
    return history if history[-1][0].answers != history[-1][1] else None


def _failure_message(
    seed: int, number: int, place: int, vector: Vector, history: list[tuple[Vector, tuple[ExpectedAnswer, ...]]]
) -> str:
    lines = [f"the result of the store differs from that of the core: seed={seed}, round {number}, step {place}"]
    if not history:
        lines += [
            "(reproduced only with all earlier steps, or only by apply_one or apply_async)",
            _format_vector(vector),
        ]
    for step, answers in history:
        lines.append(_format_vector(step))
        if answers != step.answers:
            lines += [f"    expected {_format_answers(step.answers)}", f"    got      {_format_answers(answers)}"]
    return "\n".join(lines)


def _format_vector(vector: Vector) -> str:
    asks = "; ".join(_format_ask(ask) for ask in vector.asks)
    return f"  now={vector.now}: {vector.verb} {asks}" + ("" if vector.at is None else f", at={vector.at}")


def _format_ask(ask: Ask) -> str:
    policy, key, costs = ask
    return f"{costs} at {key!r} of {policy.name} [{', '.join(map(str, policy.limits))}]"


def _format_answers(answers: Sequence[ExpectedAnswer]) -> str:
    return "; ".join(
        f"{'allowed' if answer.allowed else 'denied'} at {answer.at}, "
        f"(remaining, retry, reset) = {list(map(tuple, answer.views))}"
        for answer in answers
    )
