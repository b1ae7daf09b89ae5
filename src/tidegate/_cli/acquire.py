"""`tidegate acquire`: take permits from a running service; the exit code says whether the call was allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from tidegate._cli import EXIT_DENIED, EXIT_OK
from tidegate._cli.arguments import duration, read_cost
from tidegate._cli.durations import METAVAR
from tidegate._cli.service_args import add_verb_arguments, check_target, open_client, read_key
from tidegate._policy.durations import format_duration
from tidegate.errors import ConfigError, Denied

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.service.client._client import Client, ServiceDecision

EXAMPLES: Final = (
    ("tidegate acquire api user:42", "take one permit now, or exit with 1"),
    ("tidegate acquire api user:42 --timeout 30s", "wait for it, for at most 30 seconds"),
    ("tidegate acquire llm team:a --cost tokens=500", "take 500 permits of the unit tokens"),
    ("tidegate acquire --provider openai --ttl 1m", "reserve a call to a provider"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key or the provider, the cost, the time to wait, and the service."""
    parser.description = (
        "Take permits of a policy or a provider from a running service; wait for them with --timeout. The exit code is "
        "1 if the call is denied."
    )
    add_verb_arguments(parser, "acquire")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar=METAVAR,
        help="with --provider: reserve the permits until 'tidegate commit ID' or 'cancel ID', for at most this long",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Take the permits, and write the decision."""
    with open_client(args) as client:
        try:
            decision = acquire(client, args)
        except Denied as denied:
            decision = cast("ServiceDecision", denied.decision)
    return write_decision(decision, output)


def acquire(client: Client, args: argparse.Namespace) -> ServiceDecision:
    """Take permits of a policy or of a provider."""
    check_target(args)
    cost = None if args.cost is None else read_cost(args.cost)
    if args.provider is None:
        if args.ttl is not None:
            raise ConfigError("needs --provider", field="--ttl")
        return client.acquire(args.policy, read_key(args), 1 if cost is None else cost, args.timeout, args.priority)
    if args.ttl is None:
        return client.acquire_provider(args.provider, cost, args.timeout, args.priority)
    return client.reserve_provider(args.provider, cost, args.ttl, args.timeout, args.priority).decision


def write_decision(decision: ServiceDecision, output: Output) -> int:
    """Write a decision of the service, and return the exit code."""
    if decision.allowed:
        left = "not limited" if decision.remaining is None else f"{decision.remaining} left"
        settles = f", id {decision.id}" if decision.id else ""
        sends = f", member {output.clean(decision.member)}" if decision.member else ""
        output.write_line(f"allowed, {left}{settles}{sends}", "green")
    else:
        denied = f"denied by {', '.join(decision.violated)}"
        if decision.retry_after is None:
            output.write_line(f"{denied}: the cost is more than the limit can ever allow", "red")
        else:
            output.write_line(f"{denied}, try again in {format_duration(decision.retry_after)}", "red")
    output.write_json(decision.raw)
    return EXIT_OK if decision.allowed else EXIT_DENIED
