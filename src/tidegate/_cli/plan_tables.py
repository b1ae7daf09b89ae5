"""The reports of `tidegate plan` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.output import counted
from tidegate._cli.tables import TableColumn, TextTable, columns, draw_curve
from tidegate._policy.durations import format_duration
from tidegate.plan._report import CLOSENESS
from tidegate.plan._sections import percent, rules_diff
from tidegate.plan._suggest import to_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._cli.output import Output

CURVE_WIDTH: Final = 72
LIMIT_COLUMNS: Final = (
    TableColumn("limit", shrinks=True),
    *(TableColumn(name, right=True) for name in ("requests", "denied", "clients", "< 25 %", "< 50 %", "< 80 %")),
    *(TableColumn(name, right=True) for name in ("< 100 %", "reached it")),
)


def write_replay(report: dict[str, Any], output: Output, top: int) -> None:
    """Write the report of a replay."""
    write_log(report, output)
    totals = report["totals"]
    denied = f"{totals['denied']:,} of {counted(totals['requests'], 'request')} ({percent(totals['denied_share'])})"
    clients = f"{totals['denied_clients']:,} of {counted(totals['clients'], 'client')}"
    style = "red" if totals["denied"] else "green"
    output.write_line(f"denied: {denied}, {clients} ({percent(totals['denied_clients_share'])})", "bold", style)
    if report["range"] is not None:
        low, high = report["range"]["denied"]
        resolution = format_duration(report["range"]["resolution"])
        output.write_line(f"        {low:,} to {high:,}, because the times of the log are only known to {resolution}")
    if totals["shadow_denied"]:
        output.write_line(f"shadow: {counted(totals['shadow_denied'], 'request')} over limits that only count")
    write_waits(report, output)
    write_timeline(report["timeline"], output)
    write_limits(report["policies"], output)
    write_clients(report["clients"][:top], output)
    write_endpoints(report["endpoints"][:top], output)
    write_hours(report["hours"], output)
    for note in report["notes"]:
        output.write_line()
        output.write_line(f"Note: {note}.", "dim")


def write_log(report: dict[str, Any], output: Output) -> None:
    """Write what was read, and what could not be."""
    log = report["log"]
    output.write_line(f"{counted(log['requests'], 'request')} from {report['from']} until {report['until']}")
    if log["malformed"]:
        output.write_line(f"{counted(log['malformed'], 'malformed line')} of {log['lines']:,}:", "yellow")
        for each in log["examples"]:
            text = output.clean(each.get("excerpt", ""), 100)
            output.write_line(f"  {each['file']}:{each['line']}: {each['reason']}{': ' if text else ''}{text}")
    if log["clock_steps"]:
        output.write_line(f"the clock of the log stepped back {counted(log['clock_steps'], 'time')}", "yellow")
    if log["late"]:
        output.write_line(f"{counted(log['late'], 'request')} took over a minute, and are decided late", "yellow")
    if not log["arrival_times"]:
        output.write_line("the log has no durations: its times are taken as those at which requests arrived", "dim")


def write_waits(report: dict[str, Any], output: Output) -> None:
    """Write what denied clients would have been told, and what their retries would have met."""
    waits, retries = report["retry_after"], report["retries"]
    if waits["median"] is not None:
        texts = [f"{name} {format_duration(waits[name])}" for name in ("median", "p95", "longest")]
        never = f"; {waits['never']:,} never" if waits["never"] else ""
        output.write_line(f"Retry-After: {', '.join(texts)}{never}")
    if retries["requests"]:
        given_up = f", {counted(retries['given_up'], 'request')} given up" if retries["given_up"] else ""
        output.write_line(
            f"retries that would have followed: {retries['requests']:,}, {retries['denied']:,} denied again{given_up}"
        )


def write_timeline(timeline: dict[str, Any], output: Output) -> None:
    """Draw requests and denials over time."""
    if len(timeline["requests"]) < 2:  # noqa: PLR2004 - a curve has two points
        return
    output.write_line()
    for name, style in (("requests", "cyan"), ("denied", "red")):
        values = shrink(timeline[name], CURVE_WIDTH)
        highest = f"up to {max(timeline[name]):,} in {format_duration(timeline['step'])}"
        output.write_line(f"{name:<9}{output.style(draw_curve(values), style)} {highest}")


def shrink(values: Sequence[int], width: int) -> list[int]:
    """Return at most this many values: each the highest of its neighbours."""
    size = -(-len(values) // width)
    return [max(values[start : start + size]) for start in range(0, len(values), size)]


def write_limits(policies: list[dict[str, Any]], output: Output) -> None:
    """Write the denials of each limit, and how much of it clients used at most."""
    rows = [
        (
            f"{policy['policy']}: {limit['limit']}",
            f"{policy['requests']:,}",
            f"{limit['denied']:,}",
            f"{limit['clients']:,}",
            *(f"{count:,}" if count else "-" for count in limit["closeness"]),
        )
        for policy in policies
        for limit in policy["limits"]
    ]
    if rows:
        output.write_line()
        output.write_line(
            f"clients by how much of a limit they used at most (up to {percent(CLOSENESS[0])}, …)", "bold"
        )
        output.write_table(TextTable(LIMIT_COLUMNS, list(rows)))


def write_clients(clients: list[dict[str, Any]], output: Output) -> None:
    """Write the clients that were denied most, or came closest."""
    rows = []
    for client in clients:
        closest = client["closest"]
        near = "" if closest is None else f"{closest['used']:,} of {closest['quota'] or 0:,} ({closest['limit']})"
        first = client["first_denied"] or "-"
        name = output.clean(client["client"])
        rows.append(
            (name, f"{client['requests']:,}", f"{client['denied']:,}", percent(client["denied_share"]), first, near)
        )
    output.write_line()
    head = (
        *columns("client", "requests", "denied", ""),
        TableColumn("first denied"),
        TableColumn("closest", shrinks=True),
    )
    output.write_table(TextTable(head, list(rows)))


def write_endpoints(endpoints: list[dict[str, Any]], output: Output) -> None:
    """Write the endpoints."""
    rows = [
        (output.clean(each["endpoint"]), f"{each['requests']:,}", f"{each['denied']:,}", percent(each["denied_share"]))
        for each in endpoints
    ]
    output.write_line()
    output.write_table(TextTable(columns("endpoint", "requests", "denied", ""), list(rows)))


def write_hours(hours: list[dict[str, Any]], output: Output) -> None:
    """Draw the denials by hour of the day."""
    by_hour = {each["hour"]: each for each in hours}
    if len(by_hour) < 2:  # noqa: PLR2004 - a curve has two points
        return
    output.write_line()
    for name, style in (("requests", "cyan"), ("denied", "red")):
        values = [by_hour[hour][name] if hour in by_hour else 0 for hour in range(24)]
        output.write_line(f"{name:<9}{output.style(draw_curve(values), style)} by hour of the day, 0 to 23")


def write_diff(report: dict[str, Any], output: Output, top: int) -> None:
    """Write the report of a comparison."""
    write_log(report, output)
    for name, style in (("denied", "red"), ("allowed", "green")):
        found = report[f"newly_{name}"]
        requests = f"{counted(found['requests'], 'request')} ({percent(found['requests_share'])})"
        clients = f"{counted(found['clients'], 'client')} ({percent(found['clients_share'])})"
        money = f", ${found['usd']:,.2f}" if found["usd"] else ""
        output.write_line(f"newly {name}: {requests} of {clients}{money}", "bold", style if found["requests"] else "")
    rows = [
        (name.replace("_", " "), *(f"{report[side][name]:,}" for side in ("old", "new")))
        for name in ("requests", "denied", "clients", "denied_clients")
    ]
    output.write_line()
    output.write_table(TextTable(columns("", "old", "new"), list(rows)))
    output.write_line()
    for line in rules_diff(report["rules"]["old"], report["rules"]["new"]):
        output.write_line(line, {"-": "red", "+": "green"}.get(line[0], "dim"))
    for kind in ("client", "endpoint"):
        cells = [
            (output.clean(each[kind]), f"{each['newly_denied']:,}", f"{each['newly_allowed']:,}")
            for each in report[f"{kind}s"][:top]
        ]
        if cells:
            output.write_line()
            output.write_table(TextTable(columns(kind, "newly denied", "newly allowed"), list(cells)))
    for note in report["notes"]:
        output.write_line(f"Note: {note}.", "dim")


def write_suggestion(report: dict[str, Any], output: Output, top: int) -> None:
    """Write the suggestion as YAML; on a terminal, with the heavy clients and the trade-off below it."""
    output.write_lines(to_yaml(report).rstrip("\n").split("\n"))
    lines = []
    for group in report.get("groups", ()):
        if group["heavy"]:
            lines.append(f"# {group['category']}: {', '.join(group['heavy'][:top])} needed more than is suggested")
        for each in group["periods"]:
            points = each["tradeoff"]
            if each["suggested"] is not None and len(points) > 1:
                curve = draw_curve([over for _, over in points])
                ends = f"{points[0][0]} … {points[-1][0]:,}"
                lines.append(f"# {group['category']} per {each['period']}: clients over {ends}: {curve}")
            elif each["suggested"] is None:
                lines.append(
                    f"# {group['category']} per {each['period']}: implied by a shorter one, or the log is too short"
                )
    missed = report["goal"]["missed"] if "goal" in report else ()
    lines += [f"# more requests are denied than wanted: {', '.join(missed)}"] if missed else []
    output.write_lines([output.clean(line, 160) for line in lines])


def write_simulation(report: dict[str, Any], output: Output, top: int) -> None:
    """Write the outcomes of a simulation: a row and a curve for each rule."""
    del top  # every rule is shown
    output.write_line(
        f"{', '.join(report['traffic'])}: {counted(sum(report['offered']), 'call')} in "
        f"{format_duration(report['duration'])}, seed {report['seed']}"
    )
    hidden = report["behaviour"]["hidden"]
    rows = []
    for rule in report["rules"]:
        waits = rule["waits"]
        cells = [rule["rule"], f"{rule['admitted']:,}", percent(rule["admitted_share"]), f"{rule['denied']:,}"]
        cells.append(f"{rule['attempts']:,}")
        cells += [format_duration(waits[name]) if waits[name] else "-" for name in ("median", "p95")]
        cells.append(", ".join(f"{burst['worst']:,} of {burst['quota']:,}" for burst in rule["bursts"]))
        rows.append((*cells, *([f"{rule['refused']:,}"] if hidden else [])))
    names = ["admitted", "", "denied", "attempts", "median wait", "p95 wait", "worst burst"]
    names += ["refused"] if hidden else []
    output.write_line()
    output.write_table(TextTable((TableColumn("rule", shrinks=True), *columns("", *names)[1:]), rows))
    output.write_line()
    width = max(len(rule["rule"]) for rule in report["rules"])
    curves = {"calls": report["offered"]} | {rule["rule"]: rule["timeline"]["admitted"] for rule in report["rules"]}
    for name, values in curves.items():
        curve = draw_curve(shrink(values, CURVE_WIDTH))
        style = "cyan" if name == "calls" else "green"
        output.write_line(f"{name:<{width}} {output.style(curve, style)} up to {max(values):,}")
    step = format_duration(report["step"])
    output.write_line(
        f"The curves show calls and admitted calls per {step}. A worst burst is the most calls of one client", "dim"
    )
    output.write_line("that were admitted within any period of the limit, wherever it starts.", "dim")
