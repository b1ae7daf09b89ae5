"""Spans of agents and tools, with the names of OpenTelemetry's conventions for generative AI.

    invoke_agent planner      gen_ai.operation.name, gen_ai.agent.name, gen_ai.agent.id; tidegate.run.node
    execute_tool web_search   gen_ai.operation.name, gen_ai.tool.name

The tracer is passed to `Run(…, tracer=…)`; without one, nothing is recorded.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidegate.agents._errors import RunDenied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.agents._node import Node


def start_agent_span(tracer: Any, node: Node) -> Any:  # noqa: ANN401 - of OpenTelemetry
    """Start the span of a node that is entered, and make it current; None: nothing is traced."""
    if tracer is None:
        return None
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": node.details.name,
        "gen_ai.agent.id": node.value_name,
        "tidegate.run.node": node.title,
    }
    block = tracer.start_as_current_span(f"invoke_agent {node.details.name}", attributes=attributes)
    return block, block.__enter__()


def end_span(entered: Any, error: BaseException | None) -> None:  # noqa: ANN401 - as above
    """End a span; a denial says which node and limit denied."""
    if entered is None:
        return
    block, span = entered
    note_error(span, error)
    block.__exit__(None if error is None else type(error), error, None)


def note_error(span: Any, error: BaseException | None) -> None:  # noqa: ANN401 - as above
    """Record what a span ended with."""
    if error is None:
        return
    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, RunDenied):
        span.set_attribute("tidegate.run.denied_by", error.node or "")
        span.set_attribute("tidegate.run.limit", error.limit)


@contextmanager
def tool_span(tracer: Any, name: str) -> Iterator[None]:  # noqa: ANN401 - as above
    """Record the call of a tool."""
    if tracer is None:
        yield
        return
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    with tracer.start_as_current_span(f"execute_tool {name}", attributes=attributes) as span:
        try:
            yield
        except BaseException as error:
            note_error(span, error)
            raise
