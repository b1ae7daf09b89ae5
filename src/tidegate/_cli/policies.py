"""`tidegate policies`: list the policies of a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import add_watch_option
from tidegate._cli.live import watch
from tidegate._cli.service_args import add_service_options, open_client
from tidegate._cli.tables import TableColumn, TextTable

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.service.client._client import Client

EXAMPLES: Final = (
    ("tidegate policies", "their limits, modes and overrides"),
    ("tidegate policies --json", "the same, as JSON"),
)
FULL_ROLLOUT: Final = 100  # percent
COLUMNS: Final = (TableColumn("policy"), TableColumn("limits", shrinks=True), TableColumn("mode"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the service."""
    add_watch_option(parser)
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """List the policies with their limits and overrides, and the domains."""
    with open_client(args) as client:
        watch(lambda: show(client, output), output, args.watch)
    return 0


def show(client: Client, output: Output) -> None:
    """Write the table once."""
    response: Any = client.policies()
    rows: list[tuple[str, ...]] = []
    for policy in response["policies"]:
        rows.append((output.clean(policy["name"]), ", ".join(policy["limits"]), describe_mode(policy)))
        for override in policy["overrides"]:
            key = override["key"] if isinstance(override["key"], str) else " ".join(override["key"])
            rows.append((f"  {output.clean(key)}", ", ".join(override["limits"]), "override"))
    output.write_table(TextTable(COLUMNS, list(rows), empty="no policy is configured"))
    for domain in response["domains"]:
        output.write_line(f"domain {domain}")
    output.write_json(response)


def describe_mode(policy: dict[str, Any]) -> str:
    """Return the mode of a policy, and its rollout if that is not complete."""
    if policy["mode"] == "enforce" and policy["rollout"] < FULL_ROLLOUT:
        return f"enforced for {policy['rollout']:g} %"
    return str(policy["mode"])
