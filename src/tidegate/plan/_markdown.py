"""Reports as Markdown, for a pull request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#])")


def escape(text: object) -> str:
    """Escape a string for Markdown; names come from logs, which anybody can write to."""
    return SPECIAL.sub(r"\\\1", str(text).replace("\n", " "))


def percent(part: float) -> str:
    """Return a share."""
    return f"{100 * part:.3g} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table: its first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(map(escape, row))} |" for row in rows), ""]


def describe_log(report: Mapping[str, Any]) -> str:
    """Say what the report rests on."""
    log = report["log"]
    malformed = f", {log['malformed']:,} malformed lines left out" if log["malformed"] else ""
    return f"{log['requests']:,} requests from {report['from']} until {report['until']}{malformed}."


def replay_markdown(report: Mapping[str, Any], top: int) -> str:
    """Return the report of a replay."""
    totals = report["totals"]
    denied = f"{totals['denied']:,} of {totals['requests']:,} requests ({percent(totals['denied_share'])})"
    clients = f"{totals['denied_clients']:,} of {totals['clients']:,} clients"
    shown = percent(totals["denied_clients_share"])
    lines = [f"**{denied} and {clients} ({shown}) would have been denied.**", "", describe_log(report), ""]
    rows: list[tuple[str, ...]] = [
        (f"{policy['policy']}: {limit['limit']}", *(f"{number:,}" for number in (policy["requests"], limit["denied"])))
        for policy in report["policies"]
        for limit in policy["limits"]
    ]
    lines += table(("limit", "requests", "denied"), rows)
    listed = [client for client in report["clients"] if client["denied"]][:top]
    if listed:
        rows = [(each["client"], f"{each['requests']:,}", f"{each['denied']:,}") for each in listed]
        lines += table(("client", "requests", "denied"), rows)
    return "\n".join(lines)


def diff_markdown(report: Mapping[str, Any], top: int) -> str:
    """Return the report of a comparison."""
    denied, allowed = report["newly_denied"], report["newly_allowed"]
    shares = f"{percent(denied['requests_share'])} of requests, {percent(denied['clients_share'])} of clients"
    first = f"{denied['requests']:,} requests of {denied['clients']:,} clients would newly be denied ({shares})"
    second = f"{allowed['requests']:,} requests of {allowed['clients']:,} clients would newly be allowed"
    lines = [f"**{first}; {second}.**", "", describe_log(report), ""]
    if denied["usd"] or allowed["usd"]:
        lines += [f"Money: ${denied['usd']:,.2f} newly denied, ${allowed['usd']:,.2f} newly allowed.", ""]
    names = ("requests", "denied", "clients", "denied_clients")
    rows = [(name.replace("_", " "), f"{report['old'][name]:,}", f"{report['new'][name]:,}") for name in names]
    lines += table(("", "old", "new"), rows)
    lines += ["```diff", *rules_diff(report["rules"]["old"], report["rules"]["new"]), "```", ""]
    for kind in ("client", "endpoint"):
        found = report[f"{kind}s"][:top]
        if found:
            cells = [(each[kind], f"{each['newly_denied']:,}", f"{each['newly_allowed']:,}") for each in found]
            lines += table((kind, "newly denied", "newly allowed"), cells)
    return "\n".join(lines)


def rules_diff(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the limits that differ: removed ones with a minus, added ones with a plus."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, ()), new.get(name, ())
        lines += [f"- {name}: {limit}" for limit in before if limit not in after]
        lines += [f"+ {name}: {limit}" for limit in after if limit not in before]
        lines += [f"  {name}: {limit}" for limit in after if limit in before]
    return [line.replace("`", "'") for line in lines]


def simulation_markdown(report: Mapping[str, Any], top: int) -> str:
    """Return the report of a simulation."""
    del top  # every rule is shown
    lines = [
        "## Simulation", "",
        (
            f"{', '.join(report['traffic'])}: {sum(report['offered']):,} calls in {report['duration']:,.0f} s, "
            f"seed {report['seed']}."
        ), "",
        "| rule | admitted | denied | attempts | p95 wait | worst burst |", "|---|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for rule in report["rules"]:
        bursts = ", ".join(f"{each['worst']:,} of {each['quota']:,}" for each in rule["bursts"])
        lines.append(
            f"| `{rule['rule']}` | {rule['admitted']:,} | {rule['denied']:,} | {rule['attempts']:,} | "
            f"{rule['waits']['p95'] or 0:.1f} s | {bursts} |"
        )
    return "\n".join([*lines, ""])
