"""`tidegate top`: show the busiest policies, keys near a limit and the latest denials of a service, live."""

from __future__ import annotations

import math
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tidegate.cli.arguments import integer, seconds
from tidegate.cli.budget import format_duration
from tidegate.cli.service_args import add_service_options, open_client
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.spending.report import format_amount
from tidegate.urls import redact

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output

MEMBER_COLUMNS: Final = ("member", "state", "left", "refused", "cost")
CLEAR_SCREEN: Final = "\x1b[H\x1b[J"
RATE_SECONDS: Final = 5
CURVE_SECONDS: Final = 30
CURVE_CHARACTERS: Final = " ▁▂▃▄▅▆▇█"
MIN_COLUMNS_FOR_CURVES: Final = 100
MAX_FINDING_LENGTH: Final = 300  # characters
COLOURS: Final = {"bad": "red", "warn": "yellow", "good": "green"}  # by the level of a finding
EGRESS_COLUMNS: Final = (
    "caller", "requests", "active", "waiting", "denied", "refused", "failed", "tokens", "money", "first byte",
)  # fmt: skip
COLUMNS: Final = ("policy", "admitted/s", "denied/s", "waiting", "admitted", "denied")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the service, how often to refresh, and how much to show."""
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between updates (default: 1)"
    )
    parser.add_argument("--egress", action="store_true", help="show the callers and providers of the egress gateway")
    parser.add_argument("--once", action="store_true", help="print the tables once and exit")
    parser.add_argument(
        "--rows", type=integer, default=10, metavar="N", help="maximum number of rows in each table (default: 10)"
    )
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the service until interrupted."""
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise ConfigError(f"expected a number of seconds above 0, not {args.interval:g}", field="--interval")
    if args.rows < 1:
        raise ConfigError(f"expected an integer of at least 1, not {args.rows}", field="--rows")
    clock = SystemClock()
    with open_client(args) as client:
        while True:
            overview = client.overview()
            if args.egress:
                show_egress(overview, client.url, output, args.rows, redraw=not args.once)
            else:
                show(overview, client.url, output, args.rows, redraw=not args.once)
            if args.once:
                return 0
            clock.wait(ThreadSignal(), clock.steady() + round(args.interval * SECOND))


def show(overview: dict[str, Any], url: str, output: Output, rows: int, *, redraw: bool) -> None:
    """Show one overview of the service."""
    output.write_json(describe(overview, rows))
    write_screen(draw(overview, url, output, rows), output, redraw=redraw)


def show_egress(overview: dict[str, Any], url: str, output: Output, rows: int, *, redraw: bool) -> None:
    """Show who calls which provider through the egress gateway."""
    panel = overview["panels"].get("egress")
    if panel is None:
        raise ConfigError(
            f"{redact(url)} has no egress gateway: start the service with egress: ADDRESS", field="--egress"
        )
    found = panel["rows"][:rows]
    output.write_json({"listen": panel["listen"], "rows": found})
    write_screen(draw_egress(panel, found, output), output, redraw=redraw)


def write_screen(lines: list[str], output: Output, *, redraw: bool) -> None:
    """Write lines, over the earlier ones if the terminal is redrawn."""
    if output.live and redraw:
        lines = [CLEAR_SCREEN + lines[0], *lines[1:], "", output.style("Ctrl-C ends.", "dim")]
    for line in lines:
        output.write_line(line)


def describe(overview: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return what the screen shows, for JSON."""
    return {
        "store": overview["store"],
        "waiting": overview["waiting"],
        "in_flight": overview["in_flight"],
        "policies": busiest(overview)[:rows],
        "findings": overview.get("findings", []),
        "near": overview["near"][:rows],
        "denials": overview["denials"][:rows],
        "pools": pool_members(overview)[:rows],
    }


def pool_members(overview: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the members of pools; none if the service has no pools, or cannot read them."""
    found = overview["panels"].get("pools", [])
    return found if isinstance(found, list) else []


def busiest(overview: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the policies, those with the most calls per second first."""
    found = []
    for policy in overview["policies"]:
        admitted, denied, _ = overview["tracks"].get(policy["name"], ((), (), ()))
        fields = {name: policy[name] for name in ("name", "mode", "waiting", "admitted", "denied", "shadow")}
        found.append({**fields, "admitted_per_second": rate(admitted), "denied_per_second": rate(denied)})
    found.sort(key=lambda row: (-row["admitted_per_second"] - row["denied_per_second"], -row["denied"], row["name"]))
    return found


def rate(counts: list[int]) -> float:
    """Return the calls per second, over the last few seconds."""
    last = counts[-RATE_SECONDS:]
    return round(sum(last) / len(last), 1) if last else 0.0


def curve(counts: list[int]) -> str:
    """Draw the counts of the last half minute as block characters."""
    last = counts[-CURVE_SECONDS:]
    highest = max(last, default=0)
    return "".join(
        CURVE_CHARACTERS[0 if not count else max(1, count * (len(CURVE_CHARACTERS) - 1) // highest)] for count in last
    ).rjust(CURVE_SECONDS)


# ---- the screen ------------------------------------------------------------------------------------------------------


def draw(overview: dict[str, Any], url: str, output: Output, rows: int) -> list[str]:
    """Draw the summary and all tables."""
    wide = shutil.get_terminal_size().columns >= MIN_COLUMNS_FOR_CURVES
    lines = [draw_summary(overview, url, output), *draw_findings(overview, output), *draw_services(overview, output)]
    lines += ["", *draw_policies(overview, output, rows, wide=wide)]
    if members := pool_members(overview)[:rows]:
        lines += ["", *draw_members(members, output)]
    if overview["near"]:
        lines += ["", output.style("nearest to a limit", "bold"), *draw_nearest(overview["near"][:rows], output)]
    if overview["denials"]:
        lines += ["", output.style("latest denials", "bold"), *draw_denials(overview["denials"][:rows], output)]
    return lines


def draw_summary(overview: dict[str, Any], url: str, output: Output) -> str:
    """Describe the state of the service in one line."""
    process, store = overview["process"], overview["store"]
    uptime = format_duration(max(1.0, (overview["at"] - process["since"]) / 1000))
    state = output.style("lost", "red") if store["lost"] else "ok"
    p50, p99 = (values[-1] if values else None for values in overview["latency"])
    latency = f", p50 {p50 / 1000:.2g} ms, p99 {p99 / 1000:.2g} ms" if p50 and p99 else ""
    worker = f" with {process['workers']} workers" if process["workers"] > 1 else ""
    head = output.style(f"tidegate {process['version']} on {redact(url)}", "bold")
    calls = f"{overview['in_flight']} in flight, {overview['waiting']} waiting"
    return f"{head}: process {process['id']}{worker}, up {uptime}, store {store['kind']} {state}, {calls}{latency}"


def draw_findings(overview: dict[str, Any], output: Output) -> list[str]:
    """Say what is wrong, as the status line of the dashboard does."""
    lines = []
    for finding in overview.get("findings", []):
        since = f" since {datetime.fromtimestamp(finding['since'] / 1000, UTC):%H:%M} UTC" if finding["since"] else ""
        detail = f": {finding['detail']}" if finding["detail"] else ""
        text = output.clean(f"{finding['title']}{since}{detail}. {finding['meaning']}", MAX_FINDING_LENGTH)
        lines.append(output.style(text, COLOURS[finding["level"]]))
    return lines


def draw_egress(panel: dict[str, Any], rows: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the table of callers and providers."""
    cells = [
        (
            output.clean(f"{row['caller']} at {row['provider']}", 40),
            *(f"{row[name]:,}" for name in ("requests", "active", "waiting", "denied", "refused", "failed")),
            f"{row['input_tokens'] + row['output_tokens']:,}",
            f"{row['cost_micros'] / 1e6:,.2f}",
            f"{row['first_byte'] * 1000:,.0f} ms",
        )
        for row in rows
    ]
    widths = [max(len(row[i]) for row in (EGRESS_COLUMNS, *cells)) for i in range(len(EGRESS_COLUMNS))]
    lines = [output.style(f"egress gateway on {panel['listen']}", "bold"), ""]
    lines += [output.style(format_row(EGRESS_COLUMNS, widths), "bold"), *(format_row(each, widths) for each in cells)]
    lines = lines if rows else [*lines, "no calls yet"]
    if error := panel["rules"]["error"]:
        lines += ["", output.style(output.clean(f"The egress file is refused: {error}", MAX_FINDING_LENGTH), "yellow")]
    return lines


def draw_members(members: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the members of pools: the room of the limit that is nearest to its end, refusals and cost."""
    cells = []
    for each in members:
        nearest = max(each["limits"], key=lambda limit: limit["used"] / limit["quota"])
        left = describe_left(nearest)
        name = output.clean(f"{each['pool']}/{each['member']}", 40)
        pause = f" for {format_duration(each['frozen_for'])}" if each["state"] == "paused" else ""
        cells.append((name, each["state"] + pause, left, f"{each['refused']:,}", f"{each['cost_micros'] / 1e6:,.2f}"))
    widths = [max(len(row[i]) for row in (MEMBER_COLUMNS, *cells)) for i in range(len(MEMBER_COLUMNS))]
    return [output.style(format_row(MEMBER_COLUMNS, widths), "bold"), *(format_row(each, widths) for each in cells)]


def describe_left(limit: dict[str, Any]) -> str:
    """Describe what is left of a limit: requests, tokens or money."""
    left, quota, unit = limit["remaining"], limit["quota"], limit["unit"]
    if unit.endswith("_micros"):
        return f"{left / 1e6:,.2f} of {format_amount(quota, unit)}"
    return f"{left:,} of {quota:,} {unit}"


def draw_services(overview: dict[str, Any], output: Output) -> list[str]:
    """Name the services that share the store, if there are several."""
    services = overview.get("services", [])
    if len(services) < 2:  # noqa: PLR2004 - this one, and another
        return []
    names = (output.clean(each["name"], 60) + (" (this one)" if each["own"] else "") for each in services)
    return [f"services on this store: {', '.join(names)}"]


def draw_policies(overview: dict[str, Any], output: Output, rows: int, *, wide: bool) -> list[str]:
    """Draw the table of policies."""
    found = busiest(overview)[:rows]
    cells = [
        (output.clean(row["name"], 40), *(f"{row[name]:,}" for name in
         ("admitted_per_second", "denied_per_second", "waiting", "admitted", "denied")))
        for row in found
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (COLUMNS, *cells)) for i in range(len(COLUMNS))]
    lines = [output.style(format_row(COLUMNS, widths), "bold")]
    for row, each in zip(found, cells, strict=True):
        text = format_row(each, widths)
        if wide:
            text += f"  {curve(overview['tracks'].get(row['name'], ((),))[0])}"
        lines.append(output.style(text, "red") if row["denied_per_second"] else text)
    return lines if found else [*lines, "no policy is configured"]


def format_row(cells: tuple[str, ...], widths: list[int]) -> str:
    """Write a row of a table: the name to the left, numbers to the right."""
    first, *others = cells
    return "  ".join((first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))))


def draw_nearest(keys: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the keys nearest to a limit."""
    names = [output.clean(f"{each['policy']}: {format_key(each['key'])}") for each in keys]
    width = max(map(len, names))
    lines = []
    for name, each in zip(names, keys, strict=True):
        total = each["used"] + each["remaining"]
        left = f"{each['remaining']:,} of {total:,} {each['unit']} left in {each['limit']}"
        reset = f"reset in {format_duration(each['reset_after'])}"
        lines.append(f"{name:<{width}}  {output.draw_bar(each['used'], total, 20)}  {left}, {reset}")
    return lines


def draw_denials(denials: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the latest denials."""
    lines = []
    for each in denials:
        at = datetime.fromtimestamp(each["at"] / 1000, UTC).strftime("%H:%M:%S")
        retry = "never fits" if each["retry_after"] is None else f"retry in {format_duration(each['retry_after'])}"
        shadow = " (shadow mode: was allowed)" if each["shadow"] else ""
        name = output.clean(f"{each['policy']}: {format_key(each['key'])}")
        lines.append(f"{at}  {name}  by {', '.join(each['violated'])}, {retry}{shadow}")
    return lines


def format_key(key: str | list[str]) -> str:
    """Write a key; its parts are separated by spaces."""
    return key if isinstance(key, str) else " ".join(key)
