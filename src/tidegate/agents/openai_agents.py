"""OpenAI Agents SDK: hooks that charge agents, their models and their tools to a run.

    await Runner.run(triage, question, hooks=RunBudgetHooks(run, estimate={"tokens": 4_000}))

Each agent of a run of the SDK is a node with its name, below the current run. A denial, `RunDenied`, ends the run of
the SDK before the call is sent; that of a tool is the cause (`__cause__`) of the SDK's `UserError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.agents._framework import model_label, reserve_call_async, settle_call_async, tokens_of, tool_label
from tidegate.agents._run import AsyncRun, current_run
from tidegate.errors import ConfigError

if TYPE_CHECKING:  # so that the types of this module are known without the SDK
    Hooks = object
else:
    try:
        from agents import RunHooks as Hooks
    except ImportError:  # pragma: no cover - tests/recipes has it
        raise ConfigError("needs the OpenAI Agents SDK: pip install openai-agents") from None

if TYPE_CHECKING:
    from tidegate.agents._framework import Amounts, ReadUsage
    from tidegate.agents._reservation import BaseRunReservation


__all__ = ["RunBudgetHooks"]


class RunBudgetHooks(Hooks):
    """Charges what agents call to an AsyncRun."""

    def __init__(self, run: AsyncRun, *, estimate: Amounts | None = None, usage: ReadUsage | None = None) -> None:
        """Charge below this run.

        `estimate` is the most that a call of a model costs. Without it, models are not charged: their client does that,
        if it has a transport of tidegate. `usage` returns what a ModelResponse cost; by default, its tokens.
        """
        self._run = run
        self._estimate = estimate
        self._usage: ReadUsage = usage or (lambda response: tokens_of(response.usage))
        self._nodes: dict[str, AsyncRun] = {}
        self._open: dict[tuple[int, str], tuple[AsyncRun, BaseRunReservation]] = {}

    async def _node(self, agent: Any) -> AsyncRun:  # noqa: ANN401 - types of the SDK
        """Return the node of an agent, which is created before its first call."""
        name = (agent.name or "agent").replace("/", " ")
        found = self._nodes.get(name)
        if found is None:
            above = current_run()
            parent = above if isinstance(above, AsyncRun) else self._run
            found = self._nodes[name] = await parent.child(name)
        return found

    async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a model before it is sent."""
        del system_prompt, input_items
        node = await self._node(agent)
        if self._estimate is None:
            await node.check()
            return
        model = agent.model if isinstance(agent.model, str) else getattr(agent.model, "model", None)
        held = await reserve_call_async(node, self._estimate, model_label(str(model or "")))
        self._open[id(context), agent.name] = node, held

    async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:  # noqa: ANN401 - as above
        """Settle a call to its usage."""
        found = self._open.pop((id(context), agent.name), None)
        if found is not None:
            await settle_call_async(found[0], found[1], self._usage(response))

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:  # noqa: ANN401 - as above
        """Charge a call of a tool before it is made."""
        del context
        label = tool_label(tool.name)
        node = await self._node(agent)
        await settle_call_async(node, await reserve_call_async(node, {label: 1}, label), None)
