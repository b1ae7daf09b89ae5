"""The part of `tidegate budget` that reports money: sums of ledgers, and the ceilings of providers with a forecast."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.tables import TableColumn, TextTable, columns, draw_table
from tidegate._limiter.limiter import Limiter
from tidegate._policy import join_key, normal_key
from tidegate._policy.durations import format_duration
from tidegate._policy.units import is_money
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.outbound import Providers
from tidegate.outbound._providers.model_fields import ANY_MODEL
from tidegate.spending._ledger import read_ledger
from tidegate.spending._report import SUMS, forecast_ceiling, format_amount, parse_dimensions, sum_entries, to_csv
from tidegate.stores import open_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from tidegate._cli.output import Output
    from tidegate._policy import Key, Policy
    from tidegate.core._limit import Limit
    from tidegate.outbound import Provider
    from tidegate.spending import SpendingEntry
    from tidegate.stores import Store

DEFAULT_LEDGER: Final = "spending.db"
CEILING_COLUMNS: Final = (
    "ceiling",
    "key",
    "limit",
    "unit",
    "used",
    "quota",
    "debt",
    "pace",
    "reached_in",
    "reset_after",
)
CEILING_HEAD: Final = (
    TableColumn("ceiling", shrinks=True),
    TableColumn("key", shrinks=True),
    *(TableColumn(name, right=True) for name in ("used", "limit", "debt", "")),
    TableColumn("forecast"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that report money."""
    group = parser.add_argument_group("money")
    group.add_argument(
        "--by", metavar="COLUMNS", help="sum a ledger by these columns: day, source, member, model, team, tag"
    )
    group.add_argument(
        "--ledger", metavar="FILE", action="append", help=f"a ledger (may be repeated; default: {DEFAULT_LEDGER})"
    )
    group.add_argument("--since", metavar="DAY", help="the first day of the report, such as 2026-11-01")
    group.add_argument("--until", metavar="DAY", help="the last day of the report")
    group.add_argument("--csv", action="store_true", help="write the report as CSV")
    group.add_argument(
        "--providers",
        metavar="PATH",
        action="append",
        help="show the spending ceilings in this provider file or folder",
    )


def refuse_unused_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options of money in a command that shows a task budget."""
    for name in ("ledger", "since", "until", "csv"):
        if getattr(args, name):
            raise ConfigError("reports a ledger: add --by with its columns, such as --by model,day", field=f"--{name}")


def show(args: argparse.Namespace, output: Output) -> None:
    """Write the report, or the ceilings."""
    paths = read_paths(args)
    if args.by is None:
        rows = list(describe_ceilings(args, paths, output))
        write_ceilings(rows, output, as_csv=args.csv)
        return
    by = parse_dimensions(args.by)
    days = {"since": read_day(args, "since"), "until": read_day(args, "until")}
    entries = [entry for path in paths for entry in read_ledger(path, **days)]
    rows = sum_entries(entries, by)
    if args.csv:
        output.write_now(to_csv(rows, (*by, "unit", *SUMS)))
    else:
        output.write_json(rows)
        output.write_lines(draw(rows, by, output))


def read_paths(args: argparse.Namespace) -> list[Path]:
    """Return the ledgers; one that is given must exist."""
    paths = [Path(path) for path in args.ledger or ()]
    for path in paths or ([Path(DEFAULT_LEDGER)] if args.by is not None else []):
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist: a service, gateway or client with the setting spending: {path} creates it",
                field="--ledger",
            )
    return paths or [path for path in [Path(DEFAULT_LEDGER)] if path.exists()]


def read_day(args: argparse.Namespace, name: str) -> str:
    """Return a day as the ledger writes it."""
    text = getattr(args, name)
    if text is None:
        return "" if name == "since" else "9999"
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError(f"expected a day such as 2026-11-01, not {text!r}", field=f"--{name}") from None


def draw(rows: list[dict[str, Any]], by: tuple[str, ...], output: Output) -> list[str]:
    """Draw the report as a table."""
    if not rows:
        return ["nothing was spent in this time range"]
    head = columns(*by, "calls", "amount", "overrun", left=len(by))
    cells = [
        (
            *(output.clean(str(row[name])) or "-" for name in by),
            f"{row['calls']:,}",
            format_amount(row["amount"], row["unit"]),
            format_amount(row["overrun"], row["unit"]) if row["overrun"] else "-",
        )
        for row in rows
    ]
    return draw_table(TextTable(head, list(cells)), output)


# ---- ceilings --------------------------------------------------------------------------------------------------------


def describe_ceilings(args: argparse.Namespace, ledgers: list[Path], output: Output) -> Iterator[dict[str, Any]]:
    """Yield the money limits of all providers: what is used, the debt, and when the ceiling is reached."""
    if not args.store:
        raise ConfigError("needs the store in which the spending is counted, such as redis://host", field="--store")
    files = [path for path in args.providers if not Path(path).is_dir()]
    folders = [path for path in args.providers if Path(path).is_dir()]
    providers = Providers.load(files, folders, permissions="ignore")
    entries = [entry for path in ledgers for entry in read_ledger(path)]
    store = open_store(args.store)
    try:
        for provider in providers:
            yield from _ceilings_of(provider, entries, store, output)
    finally:
        store.close()


def _ceilings_of(
    provider: Provider, entries: list[SpendingEntry], store: Store, output: Output
) -> Iterator[dict[str, Any]]:
    members = [provider] if provider.pool is None else [member.provider for member in provider.pool.members]
    for own in members:
        unknown = sorted({"credential", "host"}.intersection(own.per))
        if not unknown:
            for of_models, key in _accounts_of(own, entries):
                yield from _describe(of_models.policy, key, own.title, store)
        elif any(is_money(limit.unit) for limit in own.limits):
            output.write_error(
                f"{own.title}: its limits apply to each {' and '.join(unknown)} separately: these are not listed here, "
                "but the metrics tidegate_money_spent_micros of a running service or gateway have them"
            )
    for ceiling in provider.ceilings:
        known = {ceiling.key(entry.team, entry.tag) for entry in entries} or {ceiling.key("", "")}
        for key in sorted(known, key=str):
            yield from _describe(ceiling.policy, key, ceiling.policy.name.removeprefix("spend:"), store)


def _accounts_of(own: Provider, entries: list[SpendingEntry]) -> Iterator[tuple[Provider, Key]]:
    """Yield the accounts that a file, or a ledger for the names of models, knows: each with its limits and key."""
    start = [own.domain, f"member={own.member}"] if own.member else [own.domain]
    paths = [[]] if "path" not in own.per else [[f"path={each.path}"] for each in own.endpoints] + [["path=*"]]
    models = {entry.model for entry in entries if (entry.source, entry.member) == (own.name, own.member)}
    for path in paths:
        if "model" in own.per:
            for model in sorted(models):
                key = normal_key((*start, *path, f"model={model or '*'}"))
                yield own.for_pattern(own.model_pattern(model)), key
            continue
        if ANY_MODEL not in dict(own.models):
            yield own, normal_key((*start, *path))
        for each in own.models:
            yield own.for_pattern(each.pattern), normal_key((*start, *path, f"models={each.pattern}"))


def _describe(policy: Policy, key: Key, name: str, store: Store) -> Iterator[dict[str, Any]]:
    limits: list[Limit] = [limit for limit in policy.limits if is_money(limit.unit)]
    if not limits:
        return
    with Limiter(policy, store=store) as limiter:
        usage = limiter.usage(key)
    for limit in limits:
        used = usage[limit.name]
        elapsed, left = find_window(limit, used.reset_after, store.clock.ns() // 1000)
        pace, reached = forecast_ceiling(used.used, used.quota, elapsed, left)
        figures = used.used, used.quota, max(0, used.used - used.quota), round(pace), reached, used.reset_after
        values = name, join_key(key), limit.name, limit.unit, *figures
        yield dict(zip(CEILING_COLUMNS, values, strict=True))


def find_window(limit: Limit, reset_after: float, now: int) -> tuple[float, float]:
    """Return for how many seconds a window has lasted, and in how many seconds it ends.

    A limit that counts any period has no window: its usage is that of a whole period, and lasts at this pace.
    """
    if limit.calendar is not None:
        start, end = limit.calendar.window(now)
        return (now - start) / SECOND, (end - now) / SECOND
    if limit.rules.windowed:
        return limit.length / SECOND - reset_after, reset_after
    return limit.length / SECOND, 0.0


def write_ceilings(rows: list[dict[str, Any]], output: Output, *, as_csv: bool) -> None:
    """Write ceilings as CSV, JSON or a table."""
    if as_csv:
        output.write_now(to_csv(rows, CEILING_COLUMNS))
        return
    output.write_json(rows)
    if not rows:
        output.write_line("no provider has a money limit")
        return
    cells = []
    for row in rows:
        if row["used"] >= row["quota"]:
            future = f"reached; reset in {format_duration(row['reset_after'])}"
        elif row["reached_in"] is None:
            future = "lasts at this pace" if row["used"] else "not in use"
        else:
            future = f"reached in {format_duration(row['reached_in'])} at this pace"
        amounts = [format_amount(row[name], row["unit"]) for name in ("used", "quota", "debt")]
        percent = f"{100 * row['used'] / row['quota']:.0f} %"
        cells.append((output.clean(row["ceiling"]), output.clean(row["key"]), *amounts, percent, future))
    output.write_table(TextTable(CEILING_HEAD, list(cells)))
