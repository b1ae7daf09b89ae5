"""`tidegate top`: show the busiest policies, keys near a limit and the latest denials of a service, live."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import DEFAULT_INTERVAL, positive_duration, positive_integer
from tidegate._cli.durations import METAVAR
from tidegate._cli.live import watch
from tidegate._cli.service_args import add_service_options, open_client
from tidegate._cli.tables import TableColumn, TextTable, columns, draw_curve, draw_table, join_within
from tidegate._policy.durations import format_duration
from tidegate._policy.units import is_money
from tidegate._runtime.urls import redact
from tidegate.errors import ConfigError
from tidegate.spending._report import format_amount, short_money

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from tidegate._cli.output import Output
    from tidegate._cli.tables import Cell

EXAMPLES: Final = (
    ("tidegate top", "the service on this machine, live; q quits, other keys sort"),
    ("tidegate top --sort denied --rows 5", "the policies with the most denials first"),
    ("tidegate top --once --json", "one overview, as JSON"),
    ("tidegate top --egress", "who calls which provider through the egress gateway"),
)
MEMBER_COLUMNS: Final = columns("member", "state", "left", "refused", "cost")
RATE_SECONDS: Final = 5
CURVE_SECONDS: Final = 30
MAX_FINDING_LENGTH: Final = 300  # characters
BAR_WIDTH: Final = 20
COLOURS: Final = {"bad": "red", "warn": "yellow", "good": "green"}  # by the level of a finding
EGRESS_COLUMNS: Final = (
    TableColumn("caller", shrinks=True),
    TableColumn("requests", right=True),
    *(TableColumn(name, right=True, optional=True) for name in ("active", "waiting")),
    *(TableColumn(name, right=True) for name in ("denied", "refused", "failed")),
    *(TableColumn(name, right=True, optional=True) for name in ("tokens", "money", "first byte")),
)
POLICY_COLUMNS: Final = (
    *columns("policy", "admitted/s", "denied/s", "waiting", "admitted", "denied"),
    TableColumn("last 30s", right=True, optional=True),
)
NEAR_COLUMNS: Final = (
    TableColumn("nearest to a limit", shrinks=True),
    TableColumn("", optional=True),
    TableColumn("left", right=True),
    TableColumn("of", right=True),
    TableColumn("unit", optional=True),
    TableColumn("limit", shrinks=True),
    TableColumn("reset in", right=True),
)
DENIAL_COLUMNS: Final = (
    TableColumn("latest denials"),
    TableColumn("policy and key", shrinks=True),
    TableColumn("limit", shrinks=True),
    TableColumn("retry in", right=True),
)


@dataclass(frozen=True)
class SortKey:
    """An order of rows: the field that is compared, the largest number first, or strings from a to z."""

    name: str
    fields: tuple[str, ...]


POLICY_ORDERS: Final = {
    "r": SortKey("rate", ("rate",)),
    "a": SortKey("admitted", ("admitted",)),
    "d": SortKey("denied", ("denied",)),
    "w": SortKey("waiting", ("waiting",)),
    "n": SortKey("name", ()),
}
EGRESS_ORDERS: Final = {
    "r": SortKey("requests", ("requests",)),
    "d": SortKey("denied", ("denied",)),
    "w": SortKey("waiting", ("waiting",)),
    "t": SortKey("tokens", ("input_tokens", "output_tokens")),
    "m": SortKey("money", ("cost_micros",)),
    "n": SortKey("name", ()),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the service, how often to refresh, and how much to show."""
    parser.description = (
        "Show the busiest policies of a running service, the keys nearest to a limit and the latest denials, live. In "
        "a terminal, q quits, and r, a, d, w and n sort by rate, admitted, denied, waiting and name."
    )
    parser.add_argument(
        "--interval",
        type=positive_duration,
        default=DEFAULT_INTERVAL,
        metavar=METAVAR,
        help="time between updates (default: 1s)",
    )
    parser.add_argument(
        "--egress", action="store_true", help="show the callers of the egress gateway and the members of pools"
    )
    parser.add_argument("--once", action="store_true", help="print the tables once and exit")
    names = sorted({each.name for each in (*POLICY_ORDERS.values(), *EGRESS_ORDERS.values())})
    parser.add_argument(
        "--sort",
        choices=names,
        metavar="COLUMN",
        help=f"sort by {', '.join(names[:-1])} or {names[-1]} (default: rate; with --egress: requests)",
    )
    parser.add_argument(
        "--rows", type=positive_integer, default=10, metavar="N", help="maximum number of rows per table (default: 10)"
    )
    add_service_options(parser)


class Sorting:
    """The order of the rows, which keys change while the view is shown."""

    def __init__(self, orders: Mapping[str, SortKey], name: str | None = None) -> None:
        """Start with the order of this name, or with the first one."""
        self._orders = orders
        by_name = {each.name: each for each in orders.values()}
        if name is not None and name not in by_name:
            raise ConfigError(f"expected {', '.join(by_name)} for this view, not {name!r}", field="--sort")
        self.order: SortKey = by_name[name] if name else next(iter(orders.values()))

    def press(self, key: str) -> bool:
        """Change the order; return whether the key does that."""
        found = self._orders.get(key.lower())
        self.order = found or self.order
        return found is not None

    def footer(self) -> str:
        """Describe the keys; the order in use is in brackets."""
        names = (f"[{each.name}]" if each == self.order else each.name for each in self._orders.values())
        return "sort by " + " ".join(f"{key}:{name}" for key, name in zip(self._orders, names, strict=True))

    def apply(self, rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """Sort rows; `name` is the field of their name."""
        return sorted(rows, key=lambda row: (-sum(row[each] for each in self.order.fields), row[name]))


def run(args: argparse.Namespace, output: Output) -> int:
    """Show the service until interrupted."""
    sorting = Sorting(EGRESS_ORDERS if args.egress else POLICY_ORDERS, args.sort)
    show_overview = show_egress if args.egress else show
    with open_client(args) as client:
        watch(
            lambda: show_overview(client.overview(), client.url, output, args.rows, sorting),
            output,
            None if args.once else args.interval,
            press=sorting.press,
            footer=sorting.footer,
        )
    return 0


def show(overview: dict[str, Any], url: str, output: Output, rows: int, sorting: Sorting) -> None:
    """Show one overview of the service."""
    if "store" not in overview:
        raise ConfigError(f"{redact(url)} is an egress gateway, not a service: add --egress", field="--url")
    output.write_json(describe(overview, rows, sorting))
    output.write_lines(draw(overview, url, output, rows, sorting))


def show_egress(overview: dict[str, Any], url: str, output: Output, rows: int, sorting: Sorting) -> None:
    """Show who calls which provider through the egress gateway, and the members of pools."""
    panel = overview["panels"].get("egress")
    if panel is None:
        advice = "start the service with egress: ADDRESS, or use the URL of an egress gateway"
        raise ConfigError(f"{redact(url)} has no egress gateway: {advice}", field="--egress")
    found = sorting.apply(panel["rows"], "caller")[:rows]
    members = pool_members(overview)[:rows]
    output.write_json({"listen": panel["listen"], "rows": found, "pools": members})
    lines = draw_egress(panel, found, output)
    output.write_lines([*lines, "", *draw_members(members, output)] if members else lines)


def describe(overview: dict[str, Any], rows: int, sorting: Sorting) -> dict[str, Any]:
    """Return what the screen shows, for JSON."""
    return {
        "store": overview["store"],
        "waiting": overview["waiting"],
        "in_flight": overview["in_flight"],
        "policies": [without_rate(row) for row in list_policies(overview, sorting)[:rows]],
        "findings": overview.get("findings", []),
        "near": overview["near"][:rows],
        "denials": overview["denials"][:rows],
        "pools": pool_members(overview)[:rows],
    }


def pool_members(overview: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the members of pools; none if the service has no pools, or cannot read them."""
    found = overview["panels"].get("pools", [])
    return found if isinstance(found, list) else []


def list_policies(overview: dict[str, Any], sorting: Sorting) -> list[dict[str, Any]]:
    """Return the policies in the chosen order, at first those with the most calls per second."""
    found = []
    for policy in overview["policies"]:
        admitted, denied, _ = overview["tracks"].get(policy["name"], ((), (), ()))
        fields = {name: policy[name] for name in ("name", "mode", "waiting", "admitted", "denied", "shadow")}
        rates = {"admitted_per_second": rate(admitted), "denied_per_second": rate(denied)}
        found.append({**fields, **rates, "rate": sum(rates.values())})
    return sorting.apply(sorted(found, key=lambda row: -row["denied"]), "name")


def without_rate(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the sum that only sorts it."""
    return {name: value for name, value in row.items() if name != "rate"}


def rate(counts: list[int]) -> float:
    """Return the calls per second, over the last few seconds."""
    last = counts[-RATE_SECONDS:]
    return round(sum(last) / len(last), 1) if last else 0.0


def curve(counts: list[int]) -> str:
    """Draw the counts of the last half minute as block characters."""
    return draw_curve(counts[-CURVE_SECONDS:]).rjust(CURVE_SECONDS)


# ---- the screen ------------------------------------------------------------------------------------------------------


def draw(overview: dict[str, Any], url: str, output: Output, rows: int, sorting: Sorting) -> list[str]:
    """Draw the summary and all tables."""
    lines = [*draw_summary(overview, url, output), *draw_findings(overview, output), *draw_services(overview, output)]
    lines += ["", *draw_policies(overview, output, rows, sorting)]
    if members := pool_members(overview)[:rows]:
        lines += ["", *draw_members(members, output)]
    if overview["near"]:
        lines += ["", *draw_nearest(overview["near"][:rows], output)]
    if overview["denials"]:
        lines += ["", *draw_denials(overview["denials"][:rows], output)]
    return lines


def draw_summary(overview: dict[str, Any], url: str, output: Output) -> list[str]:
    """Describe the state of the service, in lines that fit the terminal."""
    process, store = overview["process"], overview["store"]
    p50, p99 = (values[-1] if values else None for values in overview["latency"])
    workers = f" with {process['workers']} workers" if process["workers"] > 1 else ""
    items = [
        f"process {process['id']}{workers}",
        f"up {format_duration(max(1.0, (overview['at'] - process['since']) / 1000))}",
        f"store {store['kind']} {'lost' if store['lost'] else 'ok'}",
        f"{overview['in_flight']} in flight",
        f"{overview['waiting']} waiting",
        *([f"p50 {p50 / 1000:.2g} ms", f"p99 {p99 / 1000:.2g} ms"] if p50 and p99 else ()),
    ]
    head = output.style(f"tidegate {process['version']} on {redact(url)}", "bold")
    lines = join_within(items, output.columns) if output.live else [", ".join(items)]
    return [head, *(output.style(line, "red") if store["lost"] else line for line in lines)]


def draw_findings(overview: dict[str, Any], output: Output) -> list[str]:
    """Say what is wrong, as the status line of the dashboard does."""
    lines = []
    for finding in overview.get("findings", []):
        since = f" since {datetime.fromtimestamp(finding['since'] / 1000, UTC):%H:%M} UTC" if finding["since"] else ""
        detail = f": {finding['detail']}" if finding["detail"] else ""
        text = output.clean(f"{finding['title']}{since}{detail}. {finding['meaning']}", MAX_FINDING_LENGTH)
        wrapped = join_within(text.split(" "), output.columns, " ") if output.live else [text]
        lines += [output.style(line, COLOURS[finding["level"]]) for line in wrapped]
    return lines


def draw_egress(panel: dict[str, Any], rows: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the table of callers and providers."""
    cells = [
        (
            output.clean(f"{row['caller']} at {row['provider']}", 40),
            *(f"{row[name]:,}" for name in ("requests", "active", "waiting", "denied", "refused", "failed")),
            f"{row['input_tokens'] + row['output_tokens']:,}",
            short_money(row["cost_micros"]),
            f"{row['first_byte'] * 1000:,.0f} ms",
        )
        for row in rows
    ]
    title = output.style(f"egress gateway on {panel['listen']}", "bold")
    lines = [title, "", *draw_table(TextTable(EGRESS_COLUMNS, list(cells), empty="no calls yet"), output)]
    if error := panel["rules"]["error"]:
        lines += ["", output.style(output.clean(f"Egress file refused: {error}", MAX_FINDING_LENGTH), "yellow")]
    return lines


def draw_members(members: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the members of pools: what is left of the limit that is closest to its end, refusals and cost."""
    cells = []
    for each in members:
        nearest = max(each["limits"], key=lambda limit: limit["used"] / limit["quota"])
        left = describe_left(nearest)
        name = output.clean(f"{each['pool']}/{each['member']}", 40)
        pause = f" for {format_duration(each['frozen_for'])}" if each["state"] == "paused" else ""
        cost = f"{short_money(each['cost_micros'])} {each['currency']}" if each["currency"] else "-"
        cells.append((name, each["state"] + pause, left, f"{each['refused']:,}", cost))
    return draw_table(TextTable(MEMBER_COLUMNS, list(cells)), output)


def describe_left(limit: dict[str, Any]) -> str:
    """Describe what is left of a limit: requests, tokens or money."""
    left, quota, unit = limit["remaining"], limit["quota"], limit["unit"]
    if is_money(unit):
        return f"{short_money(left)} of {format_amount(quota, unit)}"
    return f"{left:,} of {quota:,} {unit}"


def draw_services(overview: dict[str, Any], output: Output) -> list[str]:
    """Name the services that share the store, if there are several."""
    services = overview.get("services", [])
    if len(services) < 2:  # noqa: PLR2004 - this one, and another
        return []
    names = (output.clean(each["name"], 60) + (" (this one)" if each["own"] else "") for each in services)
    return [f"services on this store: {', '.join(names)}"]


def draw_policies(overview: dict[str, Any], output: Output, rows: int, sorting: Sorting) -> list[str]:
    """Draw the table of policies."""
    found = list_policies(overview, sorting)[:rows]
    counts = ("admitted_per_second", "denied_per_second", "waiting", "admitted", "denied")
    cells: list[tuple[Cell, ...]] = [
        (
            output.clean(row["name"], 40),
            *(f"{row[name]:,}" for name in counts),
            curve(overview["tracks"].get(row["name"], ((),))[0]),
        )
        for row in found
    ]
    styles = ["red" if row["denied_per_second"] else "" for row in found]
    return draw_table(TextTable(POLICY_COLUMNS, cells, styles, empty="no policy is configured"), output)


def draw_nearest(keys: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the keys nearest to a limit."""
    cells = []
    for each in keys:
        total = each["used"] + each["remaining"]
        name = output.clean(f"{each['policy']}: {format_key(each['key'])}")
        bar, reset = output.bar(each["used"], total, BAR_WIDTH), format_duration(each["reset_after"])
        cells.append((name, bar, f"{each['remaining']:,}", f"{total:,}", each["unit"], each["limit"], reset))
    return draw_table(TextTable(NEAR_COLUMNS, list(cells)), output)


def draw_denials(denials: list[dict[str, Any]], output: Output) -> list[str]:
    """Draw the latest denials."""
    cells = []
    for each in denials:
        at = datetime.fromtimestamp(each["at"] / 1000, UTC).strftime("%H:%M:%S")
        retry = "never fits" if each["retry_after"] is None else format_duration(each["retry_after"])
        name = output.clean(f"{each['policy']}: {format_key(each['key'])}")
        cells.append((at, name, ", ".join(each["violated"]), "shadow" if each["shadow"] else retry))
    return draw_table(TextTable(DENIAL_COLUMNS, list(cells)), output)


def format_key(key: str | list[str]) -> str:
    """Write a key; its parts are separated by spaces."""
    return key if isinstance(key, str) else " ".join(key)
