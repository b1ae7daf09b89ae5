"""LangChain and LangGraph: callbacks that charge calls of models and tools to a run.

    graph.invoke(question, config={"callbacks": [RunCallback(run, estimate={"tokens": 4_000})]})
    await graph.ainvoke(question, config={"callbacks": [AsyncRunCallback(run)]})

A denial, `RunDenied`, is raised where the call was made, before it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.agents._framework import (
    model_label,
    reserve_call,
    reserve_call_async,
    settle_call,
    settle_call_async,
    tokens_of,
    tool_label,
)
from tidegate.agents._run import AsyncRun, Run, current_run
from tidegate.errors import ConfigError

if TYPE_CHECKING:  # so that the types of this module are known without the SDK
    Handler = object
    AsyncHandler = object
else:
    try:
        from langchain_core.callbacks import AsyncCallbackHandler as AsyncHandler
        from langchain_core.callbacks import BaseCallbackHandler as Handler
    except ImportError:  # pragma: no cover - tests/recipes has it
        raise ConfigError("needs LangChain: pip install langchain-core") from None

if TYPE_CHECKING:
    from uuid import UUID

    from tidegate.agents._framework import Amounts, ReadUsage
    from tidegate.agents._reservation import BaseRunReservation


__all__ = ["AsyncRunCallback", "RunCallback"]


class _Calls:
    """Calls of models that have begun, by the id that LangChain gives them."""

    def __init__(self, run: Run | AsyncRun, estimate: Amounts | None, usage: ReadUsage | None) -> None:
        self.run = run
        self.estimate = estimate
        self.usage: ReadUsage = usage or usage_of
        self.open: dict[UUID, tuple[Run | AsyncRun, BaseRunReservation]] = {}

    def node(self, kind: type[Run | AsyncRun]) -> Any:  # noqa: ANN401 - of the kind
        """Return the node that is charged: the current run, if it is for threads or tasks as this one."""
        found = current_run()
        return found if isinstance(found, kind) else self.run


class RunCallback(Handler):
    """Charges what threads call to a Run."""

    raise_error = True
    run_inline = True

    def __init__(self, run: Run, *, estimate: Amounts | None = None, usage: ReadUsage | None = None) -> None:
        """Charge the current run, or this one.

        `estimate` is the most that a call of a model costs. Without it, models are not charged: their client does that,
        if it has a transport of tidegate. `usage` returns what an LLMResult cost; by default, its tokens.
        """
        self._calls = _Calls(run, estimate, usage)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **more: Any) -> None:  # noqa: ANN401 - types of the SDK
        """Charge a call of a model before it is sent."""
        del messages
        if self._calls.estimate is not None:
            node = self._calls.node(Run)
            held = reserve_call(node, self._calls.estimate, model_label(model_of(serialized, more)))
            self._calls.open[run_id] = node, held

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **more: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a model before it is sent."""
        self.on_chat_model_start(serialized, prompts, run_id=run_id, **more)

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: ANN401 - as above
        """Settle a call to its usage."""
        found = self._calls.open.pop(run_id, None)
        if found is not None:
            settle_call(found[0], found[1], self._calls.usage(response))  # type: ignore[arg-type]  # a Run: see `node`

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: ANN401 - as above
        """Keep the estimate of a call that failed: it may have been sent."""
        del error
        self._calls.open.pop(run_id, None)

    def on_tool_start(self, serialized: Any, input_str: str, **_: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a tool before it is made."""
        del input_str
        label = tool_label((serialized or {}).get("name") or "tool")
        node = self._calls.node(Run)
        settle_call(node, reserve_call(node, {label: 1}, label), None)


class AsyncRunCallback(AsyncHandler):
    """Charges what tasks call to an AsyncRun; see RunCallback."""

    raise_error = True
    run_inline = True

    def __init__(self, run: AsyncRun, *, estimate: Amounts | None = None, usage: ReadUsage | None = None) -> None:
        """Charge the current run, or this one; see RunCallback."""
        self._calls = _Calls(run, estimate, usage)

    async def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **more: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a model before it is sent."""
        del messages
        if self._calls.estimate is not None:
            node = self._calls.node(AsyncRun)
            held = await reserve_call_async(node, self._calls.estimate, model_label(model_of(serialized, more)))
            self._calls.open[run_id] = node, held

    async def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: UUID, **more: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a model before it is sent."""
        await self.on_chat_model_start(serialized, prompts, run_id=run_id, **more)

    async def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: ANN401 - as above
        """Settle a call to its usage."""
        found = self._calls.open.pop(run_id, None)
        if found is not None:
            await settle_call_async(found[0], found[1], self._calls.usage(response))

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: ANN401 - as above
        """Keep the estimate of a call that failed: it may have been sent."""
        del error
        self._calls.open.pop(run_id, None)

    async def on_tool_start(self, serialized: Any, input_str: str, **_: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a tool before it is made."""
        del input_str
        label = tool_label((serialized or {}).get("name") or "tool")
        node = self._calls.node(AsyncRun)
        await settle_call_async(node, await reserve_call_async(node, {label: 1}, label), None)


def model_of(serialized: Any, more: dict[str, Any]) -> str:  # noqa: ANN401 - of the SDK
    """Return the name of a model."""
    parameters = more.get("invocation_params") or {}
    metadata = more.get("metadata") or {}
    found = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name")
    return str(found or (serialized or {}).get("name") or "")


def usage_of(response: Any) -> Amounts | None:  # noqa: ANN401 - of the SDK
    """Return the tokens of an LLMResult."""
    for generations in getattr(response, "generations", ()) or ():
        for generation in generations:
            found = tokens_of(getattr(getattr(generation, "message", None), "usage_metadata", None))
            if found is not None:
                return found
    return tokens_of((getattr(response, "llm_output", None) or {}).get("token_usage"))
