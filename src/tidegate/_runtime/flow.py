"""Runs flows: logic for both threads and tasks, written once as a generator of steps.

A flow yields each step that may have to wait, as data or as a function to call, and receives the result. The function
`perform` executes a step. `run` calls `perform` in a thread; `run_async` awaits what `perform` returns if it is
awaitable. The name of a generator function of steps ends in `_flow`.

    def double_flow(number: int) -> Flow[Square, int]:
        return 2 * (yield Square(number))

    run(double_flow(3), perform)

One rule for exceptions: whatever a step raises is raised at the `yield` of the flow, as if the flow had made the call
itself. This includes CancelledError, KeyboardInterrupt and what a signal handler raises, because a flow may have to
refund what it took. A flow that handles an exception may yield further steps, and may return.

The exception to the rule is GeneratorExit. A coroutine that is closed at an `await` must not await again, so the flow
is closed too. A flow that yields a step while it is closed is an error, as in any generator: a clean-up that needs a
step belongs in an `except` clause that lets GeneratorExit pass.

A StopIteration from a step does not end the flow. If the flow does not handle it, it becomes a RuntimeError, as in any
generator.

The flow is always closed: its `finally` clauses run before `run` returns or raises. If a signal handler raises between
two steps, outside `perform`, the flow is closed without learning the result of the last step. If it raises while `run`
closes the flow, the flow is closed when the exception is released. A flow can be run only once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from types import CoroutineType
from typing import Any, TypeVar

S = TypeVar("S")
R = TypeVar("R")

Flow = Generator[S, Any, R]  # yields steps S, receives their results, returns R
CallFlow = Flow[Any, R]  # yields functions to call, or steps of other flows that its `perform` also executes


def run(flow: Flow[S, R], perform: Callable[[S], Any]) -> R:
    """Run a flow in this thread, and return its result. `perform` executes one step and returns the result."""
    error: BaseException | None = None
    try:
        step = flow.send(None)
        while True:
            try:
                value = perform(step)
            except GeneratorExit:
                raise
            except BaseException as raised:  # noqa: BLE001 - the flow handles it, or raises it again
                error = without_first_frame(raised)
            else:
                step = flow.send(value)
                continue
            # Not in the except clause: an error that the flow has handled is no context of its later errors.
            step = flow.throw(error)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # R, by the type of Flow
    finally:
        error = None  # its traceback refers to this frame: no reference cycle
        flow.close()


async def run_async(flow: Flow[S, R], perform: Callable[[S], Any]) -> R:
    """Run a flow in this task, and return its result. `perform` returns the result of a step, or an awaitable of it."""
    error: BaseException | None = None
    try:
        step = flow.send(None)
        while True:
            try:
                value = perform(step)
                if type(value) is CoroutineType or hasattr(value, "__await__"):  # the usual type first: faster
                    value = await value
            except GeneratorExit:
                raise
            except BaseException as raised:  # noqa: BLE001 - as above
                error = without_first_frame(raised)
            else:
                step = flow.send(value)
                continue
            step = flow.throw(error)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # as above
    finally:
        error = None
        flow.close()


def without_first_frame(error: BaseException) -> BaseException:
    """Remove the frame that caught an error from its traceback, which then reads as if the flow had made the call."""
    traceback = error.__traceback__
    return error if traceback is None else error.with_traceback(traceback.tb_next)


def suppress_errors_flow(step: Callable[[], Any]) -> CallFlow[Any]:
    """Run a step and ignore its errors, which would only hide a response or another error."""
    with suppress(Exception):
        yield step


def complete_flow(*flows: Flow[S, Any]) -> Flow[S, None]:
    """Run flows one after the other, each even if an earlier one raised; then raise the first error.

    For clean-ups of several steps: a task may be cancelled again at each of them.
    """
    error: BaseException | None = None
    for flow in flows:
        try:
            yield from flow
        except GeneratorExit:
            raise
        except BaseException as raised:  # noqa: BLE001 - raised after the other flows
            error = error or raised
    if error is not None:
        try:
            raise error
        finally:
            error = None  # its traceback refers to this frame: no reference cycle
