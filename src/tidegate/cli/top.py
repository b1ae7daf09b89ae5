"""`tidegate top`: who asks a running service, who is near a limit and who was denied, live in the terminal."""

from __future__ import annotations

import math
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tidegate.cli.asking import add_service, open_client
from tidegate.cli.budget import duration
from tidegate.clock import SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.urls import redact

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP: Final = "show the busiest policies and the keys nearest to a limit of a running service, live"
CLEAR: Final = "\x1b[H\x1b[J"
RECENT: Final = 5  # seconds that a rate is taken over
PAST: Final = 30  # seconds that a curve shows
STEPS: Final = " ▁▂▃▄▅▆▇█"
WIDE: Final = 100  # columns from which on curves are shown
HEAD: Final = ("policy", "admitted/s", "denied/s", "waiting", "admitted", "denied")


def options(parser: argparse.ArgumentParser) -> None:
    """Take where the service is, and how often to look."""
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (1)")
    parser.add_argument("--once", action="store_true", help="look once and exit")
    parser.add_argument("--rows", type=int, default=10, metavar="N", help="lines of each table (10)")
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Look until interrupted."""
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise ConfigError(f"must be a number of seconds above 0, not {args.interval}", field="--interval")
    if args.rows < 1:
        raise ConfigError(f"must be a number from 1, not {args.rows}", field="--rows")
    clock = SystemClock()
    with open_client(args) as client:
        while True:
            told = client.overview()
            show(told, client.url, say, args.rows, redraw=not args.once)
            if args.once:
                return 0
            clock.wait(ThreadSignal(), clock.steady() + round(args.interval * SECOND))


def show(told: dict[str, Any], url: str, say: Say, rows: int, *, redraw: bool) -> None:
    """Show one look."""
    say.data(as_data(told, rows))
    lines = draw(told, url, say, rows)
    if say.live and redraw:
        lines = [CLEAR + lines[0], *lines[1:], "", say.style("Ctrl-C ends.", "dim")]
    for line in lines:
        say.line(line)


def as_data(told: dict[str, Any], rows: int) -> dict[str, Any]:
    """Give for programs what the screen shows."""
    return {
        "store": told["store"],
        "waiting": told["waiting"],
        "in_flight": told["in_flight"],
        "policies": busiest(told)[:rows],
        "near": told["near"][:rows],
        "denials": told["denials"][:rows],
    }


def busiest(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Describe the policies, those with the most calls a second first."""
    found = []
    for policy in told["policies"]:
        admitted, denied, _ = told["tracks"].get(policy["name"], ((), (), ()))
        kept = {name: policy[name] for name in ("name", "mode", "waiting", "admitted", "denied", "shadow")}
        found.append({**kept, "admitted_per_second": rate(admitted), "denied_per_second": rate(denied)})
    found.sort(key=lambda row: (-row["admitted_per_second"] - row["denied_per_second"], -row["denied"], row["name"]))
    return found


def rate(counts: list[int]) -> float:
    """Give the calls a second of the last few seconds."""
    last = counts[-RECENT:]
    return round(sum(last) / len(last), 1) if last else 0.0


def curve(counts: list[int]) -> str:
    """Draw the last half minute as a line of blocks."""
    last = counts[-PAST:]
    top = max(last, default=0)
    return "".join(STEPS[0 if not count else max(1, count * (len(STEPS) - 1) // top)] for count in last).rjust(PAST)


# ---- the screen ------------------------------------------------------------------------------------------------------


def draw(told: dict[str, Any], url: str, say: Say, rows: int) -> list[str]:
    """Draw everything."""
    wide = shutil.get_terminal_size().columns >= WIDE
    lines = [summary(told, url, say), "", *table(told, say, rows, wide=wide)]
    if told["near"]:
        lines += ["", say.style("nearest to a limit", "bold"), *nearest(told["near"][:rows], say)]
    if told["denials"]:
        lines += ["", say.style("denied last", "bold"), *denied(told["denials"][:rows], say)]
    return lines


def summary(told: dict[str, Any], url: str, say: Say) -> str:
    """Say in one line how the service is."""
    process, store = told["process"], told["store"]
    up = duration(max(1.0, (told["at"] - process["since"]) / 1000))
    state = say.style("lost", "red") if store["lost"] else "well"
    half, most = (values[-1] if values else None for values in told["latency"])
    speed = f", half within {half / 1000:.2g} ms, 99 % within {most / 1000:.2g} ms" if half and most else ""
    several = f" (one of {process['workers']})" if process["workers"] > 1 else ""
    head = say.style(f"tidegate {process['version']} on {redact(url)}", "bold")
    calls = f"{told['in_flight']} under way, {told['waiting']} waiting"
    return f"{head}: process {process['id']}{several}, up {up}, store {store['kind']} {state}, {calls}{speed}"


def table(told: dict[str, Any], say: Say, rows: int, *, wide: bool) -> list[str]:
    """Draw the policies."""
    found = busiest(told)[:rows]
    cells = [
        (say.clean(row["name"], 40), *(f"{row[name]:,}" for name in
         ("admitted_per_second", "denied_per_second", "waiting", "admitted", "denied")))
        for row in found
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (HEAD, *cells)) for i in range(len(HEAD))]
    lines = [say.style(lined(HEAD, widths), "bold")]
    for row, each in zip(found, cells, strict=True):
        text = lined(each, widths)
        if wide:
            text += f"  {curve(told['tracks'].get(row['name'], ((),))[0])}"
        lines.append(say.style(text, "red") if row["denied_per_second"] else text)
    return lines if found else [*lines, "no policy is configured"]


def lined(cells: tuple[str, ...], widths: list[int]) -> str:
    """Write a line of a table: a name to the left, numbers to the right."""
    first, *others = cells
    return "  ".join((first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))))


def nearest(keys: list[dict[str, Any]], say: Say) -> list[str]:
    """Draw the keys nearest to a limit."""
    names = [say.clean(f"{each['policy']}: {written(each['key'])}") for each in keys]
    width = max(map(len, names))
    return [
        f"{name:<{width}}  {say.bar(each['used'], each['used'] + each['remaining'], 20)}  {each['remaining']:,} of "
        f"{each['used'] + each['remaining']:,} {each['unit']} left in {each['limit']}, all back in "
        f"{duration(each['reset_after'])}"
        for name, each in zip(names, keys, strict=True)
    ]


def denied(denials: list[dict[str, Any]], say: Say) -> list[str]:
    """Draw who was denied last."""
    lines = []
    for each in denials:
        at = datetime.fromtimestamp(each["at"] / 1000, UTC).strftime("%H:%M:%S")
        again = "never" if each["retry_after"] is None else f"again in {duration(each['retry_after'])}"
        shadow = " (shadow: allowed all the same)" if each["shadow"] else ""
        who = say.clean(f"{each['policy']}: {written(each['key'])}")
        lines.append(f"{at}  {who}  by {', '.join(each['violated'])}, {again}{shadow}")
    return lines


def written(key: str | list[str]) -> str:
    """Write a key."""
    return key if isinstance(key, str) else " ".join(key)
