"""Flows: what `run` and `run_async` do with results, exceptions, cancellation and interruptions."""

import asyncio
import gc
import inspect
import traceback
import weakref
from contextlib import suppress
from operator import call

import pytest

from tests.cases import cases
from tests.interrupts import Interrupted, each_interruption
from tidegate._runtime.flow import complete_flow, run, run_async


def run_with_values(flow, perform):
    """Run a flow in a task; `perform` returns results, not awaitables."""
    return asyncio.run(run_async(flow, perform))


def run_with_awaitables(flow, perform):
    """Run a flow in a task that is suspended in every step."""

    async def suspended(step):
        await asyncio.sleep(0)
        return perform(step)

    return asyncio.run(run_async(flow, suspended))


@pytest.fixture(params=[run, run_with_values, run_with_awaitables])
def runner(request):
    return request.param


def failing(error):
    """Return a `perform` that raises the error in every step that is "fail", and returns the step otherwise."""

    def perform(step):
        if step == "fail":
            raise error
        return step

    return perform


def step_flow(step):
    return (yield step)


def test_results_are_sent_into_the_flow(runner):
    def flow():
        first = yield 1
        second = yield first + 1
        return [first, second]

    assert runner(flow(), lambda step: step * 10) == [10, 110]


def test_a_flow_without_steps_returns_its_result(runner):
    def flow():
        return "done"
        yield

    assert runner(flow(), failing(None)) == "done"


def test_a_function_can_be_a_step(runner):
    def flow():
        return (yield lambda: 3) + (yield lambda: 4)

    assert runner(flow(), call) == 7


def test_an_awaitable_that_is_not_a_coroutine_is_awaited():
    async def main():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 5)

        def flow():
            return (yield future)

        return await run_async(flow(), lambda step: step)

    assert asyncio.run(main()) == 5


@cases("kind", [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit, Interrupted])
def test_what_a_step_raises_is_raised_in_the_flow(runner, kind):
    seen = []

    def flow():
        try:
            yield "fail"
        except BaseException as error:
            seen.append(error)
            seen.append((yield "give back"))
            raise

    error = kind("reason")
    with pytest.raises(kind):
        runner(flow(), failing(error))
    assert seen == [error, "give back"]


def test_a_flow_that_handles_an_exception_goes_on(runner):
    def flow():
        results = []
        for _ in range(3):
            try:
                yield "fail"
            except (ValueError, KeyboardInterrupt) as error:
                results.append((yield str(error)))
        return results

    assert runner(flow(), failing(ValueError("a"))) == ["a", "a", "a"]
    assert runner(flow(), failing(KeyboardInterrupt("b"))) == ["b", "b", "b"]


def test_an_exception_of_a_nested_flow_reaches_the_outer_one(runner):
    def inner_flow():
        yield "fail"

    def flow():
        try:
            yield from inner_flow()
        except ValueError:
            return (yield "after")

    assert runner(flow(), failing(ValueError())) == "after"


def test_a_stop_iteration_of_a_step_does_not_end_the_flow():
    def careless_flow():
        yield "fail"

    def flow():
        try:
            yield "fail"
        except StopIteration:
            return "handled"

    error = StopIteration("not a result")
    for runner in (run, run_with_values):
        with pytest.raises(RuntimeError, match="StopIteration"):
            runner(careless_flow(), failing(error))
        assert runner(flow(), failing(error)) == "handled"


@pytest.mark.parametrize("runner", [run, run_with_values])
def test_a_generator_exit_of_a_step_closes_the_flow(runner):
    """The flow must not yield again: a coroutine that is closed cannot await."""
    seen = []

    def flow():
        try:
            yield "fail"
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            seen.append("closed")

    with pytest.raises(GeneratorExit):
        runner(flow(), failing(GeneratorExit()))
    assert seen == [GeneratorExit, "closed"]


def test_a_flow_that_yields_while_it_is_closed_is_an_error():
    def flow():
        try:
            yield "fail"
        finally:
            yield "give back"

    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        run(flow(), failing(GeneratorExit()))


def test_a_closed_coroutine_closes_its_flow():
    seen = []

    def flow():
        try:
            yield
        except BaseException as error:
            seen.append(type(error))
            raise

    async def suspended(_step):
        await asyncio.sleep(0)

    coroutine = run_async(flow(), suspended)
    coroutine.send(None)
    coroutine.close()
    assert seen == [GeneratorExit]


def test_a_flow_is_closed_when_it_ends(runner):
    def flow(step):
        yield step

    for step in ("fine", "fail"):
        generator = flow(step)
        with suppress(ValueError):
            runner(generator, failing(ValueError()))
        assert inspect.getgeneratorstate(generator) == inspect.GEN_CLOSED


# ---- cancellation ----------------------------------------------------------------------------------------------------


def test_cancelling_the_task_raises_in_the_flow_which_can_await_again():
    async def main():
        steps = []
        waiting = asyncio.Event()

        async def perform(step):
            steps.append(step)
            await asyncio.sleep(0)
            if step == "wait":
                waiting.set()
                await asyncio.Event().wait()
            return step

        def flow():
            try:
                yield "wait"
            except asyncio.CancelledError:
                steps.append((yield "give back") + ", complete")
                raise

        task = asyncio.create_task(run_async(flow(), perform))
        await waiting.wait()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), steps

    assert asyncio.run(main()) == (True, ["wait", "give back", "give back, complete"])


def test_a_flow_can_ignore_a_cancellation():
    async def main():
        def flow():
            try:
                yield asyncio.Event().wait
            except asyncio.CancelledError:
                return "complete"

        task = asyncio.create_task(run_async(flow(), call))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) == "complete"


# ---- interruptions ---------------------------------------------------------------------------------------------------


class Resource:
    """Something that flows take and give back."""

    def __init__(self):
        self.users = 0

    def use_flow(self):
        """Take the resource; give it back at the end, at the latest when the flow is closed."""
        self.users += 1
        try:
            yield "first"
            yield "second"
        finally:
            self.users -= 1


def run_async_by_hand(flow, perform):
    """Run a flow without an event loop."""
    coroutine = run_async(flow, perform)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value


@pytest.mark.parametrize("runner", [run, run_async_by_hand])
def test_an_interruption_at_any_instruction_closes_the_flow(runner):
    resource = Resource()
    interruptions = 0
    for step in each_interruption(lambda: runner(resource.use_flow(), failing(None))):
        assert resource.users == 0, step
        interruptions += 1
    assert interruptions > 5
    assert resource.users == 0


def test_an_interruption_of_a_step_is_raised_in_the_flow_at_any_instruction():
    """After `perform` was called and until it returned, the flow learns of it."""
    outcomes = []

    class Step:
        def __init__(self):
            self.began = self.ended = False

        def __call__(self):
            self.began = True
            interruptible()
            self.ended = True

    def interruptible():
        run(iter_flow(), call)  # instructions of the package

    def iter_flow():
        yield int

    def flow(step):
        try:
            yield step
        except BaseException as error:
            outcomes.append(type(error))
            raise

    def attempt():
        step = Step()
        try:
            run(flow(step), call)
        except Interrupted:
            if step.began and not step.ended:
                assert outcomes == [Interrupted]
            raise
        finally:
            outcomes.clear()

    assert sum(1 for _ in each_interruption(attempt)) > 5


# ---- nesting ---------------------------------------------------------------------------------------------------------


def test_a_step_can_run_another_flow():
    def numbers_flow(depth):
        if not depth:
            return 0
        below = yield depth - 1
        return below + 1

    def perform(depth):
        return run(numbers_flow(depth), perform)

    async def perform_async(depth):
        return await run_async(numbers_flow(depth), perform_async)

    assert run(numbers_flow(20), perform) == 20
    assert asyncio.run(run_async(numbers_flow(20), perform_async)) == 20


def test_a_flow_cannot_run_itself():
    def flow():
        run(generator, call)
        yield

    generator = flow()
    with pytest.raises(ValueError, match="already executing"):
        run(generator, call)


# ---- tracebacks and memory -------------------------------------------------------------------------------------------


def failing_perform(_step):
    raise ValueError("reason")


def test_a_traceback_reads_as_if_the_flow_had_made_the_call():
    def inner_flow():
        yield "step"

    def flow():
        yield from inner_flow()

    with pytest.raises(ValueError, match="reason") as caught:
        run(flow(), failing_perform)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["run", "flow", "inner_flow", "failing_perform"]
    assert caught.value.__context__ is None


def test_an_exception_that_the_flow_has_handled_is_no_context_of_later_ones(runner):
    def flow():
        with suppress(ValueError):
            yield "fail"
        raise KeyError

    with pytest.raises(KeyError) as caught:
        runner(flow(), failing(ValueError()))
    assert caught.value.__context__ is None


def test_an_exception_that_the_flow_translates_is_its_context(runner):
    def flow():
        try:
            yield "fail"
        except ValueError:
            raise KeyError from None

    with pytest.raises(KeyError) as caught:
        runner(flow(), failing(ValueError()))
    assert isinstance(caught.value.__context__, ValueError)
    assert caught.value.__suppress_context__


class Marker:
    """Something that only one frame refers to."""


@pytest.mark.parametrize("runner", [run, run_async_by_hand])
@pytest.mark.parametrize("handled", [True, False])
def test_no_reference_cycle_keeps_frames_alive(runner, handled):
    markers = []

    def perform(_step):
        marker = Marker()
        markers.append(weakref.ref(marker))
        raise ValueError

    def flow():
        marker = Marker()
        markers.append(weakref.ref(marker))
        try:
            yield
        except ValueError:
            if not handled:
                raise

    gc.disable()
    try:
        with suppress(ValueError):
            runner(flow(), perform)
        assert [marker() for marker in markers] == [None, None]
    finally:
        gc.enable()


# ---- clean-ups of several steps --------------------------------------------------------------------------------------


def test_each_flow_of_a_clean_up_runs_and_the_first_error_is_raised(runner):
    def steps_flow(name):
        done.append((yield name))
        done.append((yield f"{name} again"))

    def flow():
        yield from complete_flow(*map(steps_flow, ("first", "fail", "second", "fail", "third")))

    done, errors = [], iter([KeyError("first"), ValueError("second")])

    def perform(step):
        if step == "fail":
            raise next(errors)
        return step

    with pytest.raises(KeyError):
        runner(flow(), perform)
    assert done == ["first", "first again", "second", "second again", "third", "third again"]


def test_a_clean_up_without_errors_returns(runner):
    def flow():
        yield from complete_flow(step_flow(1), step_flow(2))
        return "done"

    assert runner(flow(), lambda step: step) == "done"


def test_a_clean_up_that_is_closed_runs_no_further_steps():
    def flow():
        yield from complete_flow(step_flow(1), step_flow(2))

    closing = flow()
    assert next(closing) == 1
    closing.close()
    assert inspect.getgeneratorstate(closing) == inspect.GEN_CLOSED
