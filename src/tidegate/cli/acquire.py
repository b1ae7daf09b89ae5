"""`tidegate acquire`: take permits from a running service; the exit code says whether the call was allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tidegate.cli import EXIT_DENIED, EXIT_OK
from tidegate.cli.service_args import add_verb_arguments, open_client, read_cost, read_key
from tidegate.errors import Denied

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output
    from tidegate.service.client.client import ServiceDecision


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key, the cost, the time to wait, and the service."""
    add_verb_arguments(parser, "acquire")


def run(args: argparse.Namespace, output: Output) -> int:
    """Take the permits, and write the decision."""
    with open_client(args) as client:
        try:
            decision = client.acquire(args.policy, read_key(args), read_cost(args.cost), args.timeout, args.priority)
        except Denied as denied:
            decision = cast("ServiceDecision", denied.decision)
    return write_decision(decision, output)


def write_decision(decision: ServiceDecision, output: Output) -> int:
    """Write a decision of the service, and return the exit code."""
    if decision.allowed:
        output.write_line(f"allowed, {decision.remaining} left", "green")
    else:
        denied = f"denied by {', '.join(decision.violated)}"
        if decision.retry_after is None:
            output.write_line(f"{denied}: the cost is more than the limit can ever allow", "red")
        else:
            output.write_line(f"{denied}, try again in {decision.retry_after:g} s", "red")
    output.write_json(decision.raw)
    return EXIT_OK if decision.allowed else EXIT_DENIED
