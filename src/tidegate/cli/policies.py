"""`tidegate policies`: what a running service decides by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.asking import add_service, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "list the policies of a running service"
WHOLE = 100


def options(parser: argparse.ArgumentParser) -> None:
    """Take where the service is."""
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Ask, and list."""
    with open_client(args) as client:
        said = client.policies()
    for policy in said["policies"]:
        share = "" if policy["rollout"] >= WHOLE else f", enforced for {policy['rollout']:g} % of keys"
        mode = ", shadow" if policy["mode"] == "shadow" else share
        say.line(f"{policy['name']}: {', '.join(policy['limits'])}{mode}")
        for override in policy["overrides"]:
            key = override["key"] if isinstance(override["key"], str) else " ".join(override["key"])
            say.line(f"  {key}: {', '.join(override['limits'])}", "dim")
    for domain in said["domains"]:
        say.line(f"domain {domain}")
    say.data(said)
    return 0
