"""`tidegate runs`: show the runs of agents as trees with bars, live; stop, extend and close nodes; report usage.

The runs are those of a store (`--store`), or of the store of a running service.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import DEFAULT_INTERVAL, positive_duration
from tidegate._cli.durations import METAVAR
from tidegate._cli.live import watch
from tidegate._cli.run_access import open_runs
from tidegate._cli.service_args import add_service_options
from tidegate._cli.tables import TableColumn, TextTable, columns, draw_table
from tidegate._policy.durations import format_duration
from tidegate._policy.units import is_money
from tidegate._runtime.clock import SystemClock
from tidegate.agents._reports import COLUMNS as REPORT_COLUMNS
from tidegate.agents._reports import sum_rows
from tidegate.errors import ConfigError
from tidegate.spending._report import format_amount, to_csv

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate._cli.run_access import RunAccess, RunTree
    from tidegate._cli.tables import Cell

EXAMPLES: Final = (
    ("tidegate runs", "the runs of the service on this machine, live; q quits"),
    ("tidegate runs --store sqlite:///runs.db --once", "those of a store, once"),
    ("tidegate runs stop 6f1c… --end-streams", "no further call of the run, anywhere"),
    ("tidegate runs extend 6f1c… --add usd=0.10", "10 cents more"),
    ("tidegate runs report 6f1c… --by tool,model --csv", "what tools and models used"),
)
ACTIONS: Final = {
    "show": "the trees, live (the default)",
    "stop": "deny every later call of a node and of those below it",
    "extend": "add to the quotas of a node, or move its end",
    "close": "end a node, and return what its carve-outs have left",
    "report": "what was used, for each node, tool and model",
}
TREE: Final = (
    TableColumn("node", shrinks=True),
    TableColumn("limit", optional=True),
    TableColumn(""),
    TableColumn("used", right=True),
    TableColumn("left", right=True),
    TableColumn("state"),
)
MAX_RUNS: Final = 20
MAX_NODES: Final = 200  # of one run
STATES: Final = {"stopped": "red", "closed": "dim", "ended": "dim"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the action, the node, and where the runs are."""
    parser.description = (
        "Show runs of agents and their budgets, live; stop, extend and close them; report usage. The runs of a "
        "service need its admin token, if it has tokens."
    )
    actions = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", nargs="?", default="show", choices=ACTIONS, metavar="ACTION", help=actions)
    parser.add_argument("id", nargs="?", metavar="ID", help="the id of a run, or of a node of it (see --ids)")
    parser.add_argument("--store", metavar="URL", help="the store of the runs, instead of a service")
    parser.add_argument("--all", action="store_true", help="show runs that have ended, too")
    parser.add_argument("--ids", action="store_true", help="show the ids of all nodes")
    parser.add_argument("--once", action="store_true", help="print the runs once and exit")
    parser.add_argument(
        "--interval",
        type=positive_duration,
        default=DEFAULT_INTERVAL,
        metavar=METAVAR,
        help="time between updates (default: 1s)",
    )
    parser.add_argument("--end-streams", action="store_true", help="stop: end responses that a gateway passes on, too")
    parser.add_argument("--add", metavar="AMOUNTS", help="extend: what to add, such as usd=0.10,requests=20")
    parser.add_argument("--ttl", type=positive_duration, metavar=METAVAR, help="extend: the new end, from now on")
    parser.add_argument("--by", metavar="COLUMNS", help="report: sum by node, tool or model (default: all three)")
    parser.add_argument("--csv", action="store_true", help="report: write CSV")
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Show, change or report runs."""
    if args.action not in ("show", "report") and args.id is None:
        raise ConfigError(f"expected the id of a node, such as: tidegate runs {args.action} 6f1c…", field="ID")
    if not args.store and not args.url and os.environ.get("TIDEGATE_STORE"):
        args.store = os.environ["TIDEGATE_STORE"]
    with open_runs(args) as access:
        if args.action == "show":
            view = RunsView(access, output, args)
            watch(view.show, output, None if args.once else args.interval)
        elif args.action == "report":
            write_report(access, args, output)
        else:
            change(access, args, output)
    return 0


def change(access: RunAccess, args: argparse.Namespace, output: Output) -> None:
    """Stop, extend or close a node."""
    if args.action == "stop":
        access.stop(args.id, end_streams=args.end_streams)
        said = "is stopped: no further call of it is admitted"
    elif args.action == "close":
        access.close(args.id)
        said = "is closed"
    else:
        if not args.add and args.ttl is None:
            raise ConfigError("needs --add, such as --add usd=0.10, or --ttl", field="extend")
        access.extend(args.id, read_amounts(args.add or ""), args.ttl)
        said = "is extended"
    output.write_line(f"{output.clean(args.id)} {said}")
    output.write_json({"ok": True})


def read_amounts(text: str) -> dict[str, str]:
    """Read amounts such as usd=0.10,requests=20."""
    pairs = [each.partition("=") for each in text.split(",") if each]
    if not all(unit.strip() and amount.strip() for unit, _, amount in pairs):
        raise ConfigError(f"expected amounts such as usd=0.10,requests=20, not {text!r}", field="--add")
    return {unit.strip(): amount.strip() for unit, _, amount in pairs}


# ---- trees -----------------------------------------------------------------------------------------------------------


class RunsView:
    """The trees as they are drawn."""

    def __init__(self, access: RunAccess, output: Output, args: argparse.Namespace) -> None:
        """Show the runs that the arguments name."""
        self._access = access
        self._output = output
        self._id = args.id
        self._all = args.all or args.id is not None
        self._ids = args.ids
        self._clock = SystemClock()

    def show(self) -> None:
        """Read the trees, and draw them."""
        trees = [self._access.read(self._id)] if self._id else self._trees()
        self._output.write_json({"runs": [tree.describe() for tree in trees]})
        self._output.write_lines(self.draw(trees))

    def _trees(self) -> list[RunTree]:
        found: list[RunTree] = []
        for identifier in self._access.identifiers():
            tree = self._access.read(identifier)
            if self._all or tree.status in ("open", "stopped"):
                found.append(tree)
            if len(found) == MAX_RUNS:
                break
        return found

    def draw(self, trees: list[RunTree]) -> list[str]:
        """Draw the trees as lines of text."""
        if not trees:
            return ["no run is open; --all also shows those that have ended"]
        rows: list[tuple[Any, ...]] = []
        for tree in trees:
            rows += self._rows(tree)
        return draw_table(TextTable(TREE, rows), self._output)

    def _rows(self, root: RunTree) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        hidden = 0
        for depth, node in root.walk():
            if len(rows) >= MAX_NODES:
                hidden += 1
                continue
            name = "  " * depth + self._output.clean(node.name)
            name += f"  {node.id}" if self._ids or not depth else ""
            state: Cell = ((self._state(node), STATES.get(node.status, "")),)
            if not node.limits:
                used = ", ".join(amount(number, unit) for unit, number in node.used.items() if number)
                rows.append((name, "", "", used, "", state))
            for limit_name, limit in node.limits.items():
                shown, name = name, ""
                unit = limit.unit
                bar = self._output.bar(limit.used, limit.quota, 20)
                rows.append((shown, limit_name, bar, amount(limit.used, unit), amount(limit.remaining, unit), state))
        if hidden:
            rows.append((f"… {hidden} more nodes", "", "", "", "", ""))
        return rows

    def _state(self, node: RunTree) -> str:
        if node.status != "open":
            return node.status
        left = max(0.0, node.ends - self._clock.ns() / 1e9)
        return f"ends in {format_duration(max(1, round(left)))}"


def amount(number: int, unit: str) -> str:
    """Write an amount with its unit."""
    return format_amount(number, unit) if is_money(unit) else f"{number:,} {unit}"


# ---- reports ---------------------------------------------------------------------------------------------------------


def write_report(access: RunAccess, args: argparse.Namespace, output: Output) -> None:
    """Write what was used, for each node, tool and model."""
    by = tuple(each.strip() for each in args.by.split(",")) if args.by else REPORT_COLUMNS
    identifiers = [args.id] if args.id else access.identifiers()[:MAX_RUNS]
    rows = sum_rows([row for identifier in identifiers for row in access.report(identifier)], by)
    units = [name for name in rows[0] if name not in by] if rows else []
    if args.csv:
        output.write_now(to_csv(rows, (*by, *units)))
        return
    output.write_json(rows)
    head = columns(*by, *units, left=len(by))
    cells = [
        (
            *(output.clean(str(row[name])) or "-" for name in by),
            *(format_amount(int(row[unit]), unit) if is_money(unit) else f"{row[unit]:,}" for unit in units),
        )
        for row in rows
    ]
    output.write_lines(draw_table(TextTable(head, list(cells), empty="nothing was used"), output))
