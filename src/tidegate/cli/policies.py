"""`tidegate policies`: list the policies of a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.service_args import add_service_options, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output

FULL_ROLLOUT = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the service."""
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """List the policies with their limits and overrides, and the domains."""
    with open_client(args) as client:
        response = client.policies()
    for policy in response["policies"]:
        share = "" if policy["rollout"] >= FULL_ROLLOUT else f", enforced for {policy['rollout']:g} % of keys"
        mode = ", shadow" if policy["mode"] == "shadow" else share
        output.write_line(f"{policy['name']}: {', '.join(policy['limits'])}{mode}")
        for override in policy["overrides"]:
            key = override["key"] if isinstance(override["key"], str) else " ".join(override["key"])
            output.write_line(f"  {key}: {', '.join(override['limits'])}", "dim")
    for domain in response["domains"]:
        output.write_line(f"domain {domain}")
    output.write_json(response)
    return 0
