"""pydantic-ai: a capability that charges an agent, its tools and its models to a run.

    budget = RunBudget(run, estimate={"tokens": 4_000})
    agent = Agent("openai:gpt-4o-mini", name="planner", capabilities=[budget])

Each run of an agent is a node with the name of the agent, below the current run. A tool that calls another agent with
the same capability gives a child of this node. A denial, `RunDenied`, ends the agent before the call is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.agents._framework import model_label, reserve_call_async, settle_call_async, tokens_of, tool_label
from tidegate.agents._run import AsyncRun, current_run
from tidegate.errors import ConfigError

if TYPE_CHECKING:  # so that the types of this module are known without the SDK
    Capability = object
else:
    try:
        from pydantic_ai.capabilities import AbstractCapability as Capability
    except ImportError:  # pragma: no cover - tests/recipes has it
        raise ConfigError("needs pydantic-ai: pip install pydantic-ai-slim") from None

if TYPE_CHECKING:
    from tidegate.agents._framework import Amounts, ReadUsage


__all__ = ["RunBudget"]


class RunBudget(Capability):
    """Charges runs of an agent, and what they call, to an AsyncRun."""

    def __init__(self, run: AsyncRun, *, estimate: Amounts | None = None, usage: ReadUsage | None = None) -> None:
        """Charge below this run.

        `estimate` is the most that a call of a model costs. Without it, models are not charged: their client does that,
        if it has a transport of tidegate. `usage` returns what a ModelResponse cost; by default, its tokens.
        """
        self._run = run
        self._estimate = estimate
        self._usage: ReadUsage = usage or (lambda response: tokens_of(response.usage))

    async def wrap_run(self, ctx: Any, *, handler: Any) -> Any:  # noqa: ANN401 - types of the SDK
        """Run the agent in a node of its own."""
        above = current_run()
        parent = above if isinstance(above, AsyncRun) else self._run
        name = (getattr(ctx.agent, "name", None) or "agent").replace("/", " ")
        async with parent.child(name):
            return await handler()

    async def wrap_model_request(self, ctx: Any, *, request_context: Any, handler: Any) -> Any:  # noqa: ANN401 - as above
        """Charge a call of a model before it is sent."""
        if self._estimate is None:
            return await handler(request_context)
        node = current_run() or self._run
        held = await reserve_call_async(node, self._estimate, model_label(ctx.model.model_name))
        response = await handler(request_context)  # if it fails, the estimate stays charged: it may have been sent
        await settle_call_async(node, held, self._usage(response))
        return response

    async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:  # noqa: ANN401 - as above
        """Charge a call of a tool before it is made."""
        del ctx, tool_def
        label = tool_label(call.tool_name)
        await settle_call_async(
            self._run, await reserve_call_async(current_run() or self._run, {label: 1}, label), None
        )
        return await handler(args)
