"""`charged`: functions whose calls are charged to the current run, such as tools."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tidegate.agents._limits import MAX_LABEL
from tidegate.agents._reports import TOOL
from tidegate.agents._run import AsyncRun, Run, current_run
from tidegate.agents._tracing import tool_span
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.agents._limits import RunCost

P = ParamSpec("P")
R = TypeVar("R")


def charged(cost: RunCost = 1, *, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, or a coroutine function, whose calls are charged to the current run before they are made.

    `@charged({"tool:web_search": 1})` is counted by nodes with a limit such as `20/run unit=tool:web_search`, and by
    those above and below. Reports show it as the tool `name`, by default that of the function. If the function raises,
    the charge is refunded. Without a current run, the call is refused.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        tool = str(name or getattr(function, "__name__", "function"))[: MAX_LABEL - len(TOOL) - 1]
        label = f"{TOOL}:{tool}"
        shown = getattr(function, "__qualname__", repr(function))
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{shown} is a generator function: reserve inside it")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def charged_task(*args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
                run = _find_run(shown)
                with tool_span(run.tracer, tool):
                    if isinstance(run, AsyncRun):
                        async with await run.reserve(cost, label=label):
                            return await function(*args, **kwargs)
                    with run.reserve(cost, label=label):
                        return await function(*args, **kwargs)

            return charged_task  # type: ignore[return-value]  # a coroutine function in place of one

        @functools.wraps(function)
        def charged_call(*args: P.args, **kwargs: P.kwargs) -> R:
            run = _find_run(shown)
            if not isinstance(run, Run):
                raise ConfigError(f"{shown} is called in a task of an AsyncRun: make it a coroutine function")
            with tool_span(run.tracer, tool), run.reserve(cost, label=label):
                return function(*args, **kwargs)

        return charged_call

    return decorate


def _find_run(name: str) -> Run | AsyncRun:
    found = current_run()
    if found is None:
        raise ConfigError(f"{name} is charged to the current run, and there is none: call it in `with Run(…)`")
    return found
