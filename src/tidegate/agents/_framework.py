"""What the modules for agent frameworks share: charges a call of a model or a tool, and settles it to its usage.

Money and tokens of a model are charged here only if an estimate is given: a client that uses the transports of
tidegate, or its gateway, charges the current run itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tidegate._limiter.joint import async_performer, performer
from tidegate._runtime.flow import run, run_async
from tidegate.agents._limits import MAX_LABEL, to_counted
from tidegate.agents._reports import MODEL, TOOL

if TYPE_CHECKING:
    from tidegate.agents._limits import Amount
    from tidegate.agents._reservation import BaseRunReservation
    from tidegate.agents._run import AsyncRun, Run

Amounts = Mapping[str, "Amount"]
ReadUsage = Callable[[Any], Amounts | None]


def tool_label(name: str) -> str:
    """Return the label of a tool."""
    return f"{TOOL}:{name}"[:MAX_LABEL]


def model_label(name: str) -> str:
    """Return the label of a model."""
    return f"{MODEL}:{name or 'unknown'}"[:MAX_LABEL]


def tokens_of(usage: Any) -> Amounts | None:  # noqa: ANN401 - an object or a mapping of a framework
    """Return the tokens of a usage, in the units that tidegate counts; None: it is not known."""

    def read(*names: str) -> int | None:
        for name in names:
            found = usage.get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
            if isinstance(found, int):
                return found
        return None

    if usage is None:
        return None
    given, made = read("input_tokens", "prompt_tokens"), read("output_tokens", "completion_tokens")
    total = read("total_tokens")
    if given is None and made is None and total is None:
        return None
    found = {"input_tokens": given, "output_tokens": made, "tokens": total or (given or 0) + (made or 0)}
    return {unit: amount for unit, amount in found.items() if amount is not None}


def counted(amounts: Amounts) -> dict[str, int]:
    """Return amounts by counted unit."""
    return dict(to_counted(unit, amount) for unit, amount in amounts.items())


async def reserve_call_async(node: AsyncRun | Run, cost: Amounts, label: str) -> BaseRunReservation:
    """Charge a call before it is made; units that no node counts are left out."""
    return await run_async(node.charge_flow(counted(cost), None, label), async_performer(node.clock))


async def settle_call_async(node: AsyncRun | Run, held: BaseRunReservation, usage: Amounts | None) -> None:
    """Correct the estimate to the usage (None: keep it)."""
    flow = held.commit_usage_flow(None if usage is None else counted(usage))
    await run_async(flow, async_performer(node.clock))


def reserve_call(node: Run, cost: Amounts, label: str) -> BaseRunReservation:
    """Charge a call before it is made; see `reserve_call_async`."""
    return run(node.charge_flow(counted(cost), None, label), performer(node.clock))


def settle_call(node: Run, held: BaseRunReservation, usage: Amounts | None) -> None:
    """Correct the estimate to the usage; see `settle_call_async`."""
    run(held.commit_usage_flow(None if usage is None else counted(usage)), performer(node.clock))
