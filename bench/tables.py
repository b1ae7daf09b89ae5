"""Results as plain tables, for the terminal and for docs/reference/benchmarks.md."""

from __future__ import annotations

from typing import Any, Final

from bench.libraries import OURS
from bench.targets import TargetResult, fastest
from bench.threads import MISTAKES

BEGIN: Final = "<!-- figures: written by make bench -->"
END: Final = "<!-- end of figures -->"


def heading(results: dict[str, Any]) -> str:
    """Say what is compared, where."""
    place = results["machine"]
    lines = [f"{place['implementation']} {place['python']}, {place['system']}, {place['processors']} processors"]
    lines += [f"  {each['name']:16} {each['version']:8} {each['strategy']}" for each in results["libraries"].values()]
    return "\n".join(lines)


def table(name: str, found: dict[str, Any], libraries: dict[str, dict[str, str]]) -> str:
    """Show one comparison."""
    header, rows = rows_of(name, found)
    lines = ["", f"{name}: {header[0]}", f"  {'':16}" + "".join(f"{title:>26}" for title in header[1:])]
    for library, cells in rows.items():
        lines.append(f"  {libraries[library]['name']:16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def rows_of(name: str, found: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Lay one comparison out: what its figures are and its columns' titles; the cells of each library."""
    if name == "threads":
        return thread_rows(found)
    if name == "memory":
        names = next(iter(found.values()))["bytes"]
        header = [
            "bytes per key, without the key itself",
            *(case["title"].split(", ", 1)[1] for case in found.values()),
        ]
        return header, {each: [size_cell(case, each) for case in found.values()] for each in names}
    names = {each: None for case in found.values() for each in case["ns"]}
    header = [
        "nanoseconds per decision: best slice (median), ratio to tidegate",
        *(case["title"] for case in found.values()),
    ]
    return header, {each: [time_cell(case, each) for case in found.values()] for each in names}


def size_cell(case: dict[str, Any], library: str) -> str:
    """Write one size, and with how many keys where the library was too slow to get them all."""
    weighed = case["bytes"][library]
    whole = f"{int(weighed['keys']):,} keys" == case["title"].split(", ", 1)[1]
    return f"{weighed['bytes']:.0f}" + ("" if whole else f" (at {int(weighed['keys']):,})")


def time_cell(case: dict[str, Any], library: str) -> str:
    """Write one timing; the fastest peer is marked with a star."""
    if library not in case["ns"]:
        return "-"
    timing, ours = case["ns"][library], case["ns"][OURS]
    star = "*" if library == fastest(case)[0] else ""
    ratio = "" if library == OURS else f" {star}{timing.best / ours.best:.1f}x"
    return f"{timing.best:,.0f} ({timing.usual:,.0f}){ratio}"


def thread_rows(found: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Lay out rates and mistakes."""
    fast, exact = found["threads-fast"]["runs"], found["threads-exact"]["runs"]
    header = [
        "8 threads on one key",
        "decisions/s, best (median)",
        "over-admitted",
        "wrongly denied",
        "errors",
        "of calls",
    ]
    rows = {}
    for each, run in fast.items():
        counts = [f"{int(run[kind] + exact[each][kind]):,}" for kind in (*MISTAKES, "calls")]
        rows[each] = [f"{run['best']:,.0f} ({run['usual']:,.0f})", *counts]
    return header, rows


def target_lines(found: list[TargetResult]) -> str:
    """Show which targets are met."""
    return "\n".join(
        ["", "targets", *(f"  {'met    ' if each.met else 'NOT MET'}  {each.target}: {each.figure}" for each in found)]
    )


def into_page(page: str, results: dict[str, Any]) -> str:
    """Put the figures between the marks of a Markdown page."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n" + markdown(results) + END + after


def markdown(results: dict[str, Any]) -> str:
    """Write everything as Markdown."""
    place, libraries = results["machine"], results["libraries"]
    where = f"{place['implementation']} {place['python']} on {place['system']}, {place['processors']} processors"
    lines = [
        "",
        f"Measured {place['date']} with {where}.",
        "",
        *grid(["library", "version", "configuration"], [list(each.values()) for each in libraries.values()]),
    ]
    for name in (name for name in results if name not in ("machine", "libraries", "targets", "seconds", "programs")):
        header, rows = rows_of(name, results[name])
        cells = [[libraries[library]["name"], *cells] for library, cells in rows.items()]
        lines += [f"**{header[0][0].upper()}{header[0][1:]}**", "", *grid(["", *header[1:]], cells)]
    lines += ["**Targets**", ""]
    lines += grid(
        ["target", "result", "measured"],
        [[t.target, "met" if t.met else "**not met**", t.figure] for t in results["targets"]],
    )
    for program in results["programs"].values():
        lines += [f"**{program['title']}**", "", "```text", program["said"].rstrip(), "```", ""]
    return "\n".join(lines)


def grid(header: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cells) + " |" for cells in lines), ""]
