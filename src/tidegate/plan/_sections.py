"""What a report says, as sections: a Markdown file and an HTML page show the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Given = Mapping[str, Any]  # a report


class Series(NamedTuple):
    """A line of a chart; `style` is admitted, denied or waiting."""

    name: str
    values: Sequence[float]
    style: str


class Chart(NamedTuple):
    """Values over time, or over quotas; `first` and `last` label the ends of the axis."""

    title: str
    series: Sequence[Series]
    first: str
    last: str


class Section(NamedTuple):
    """A part of a report: a sentence, a chart, a table, and lines of a comparison."""

    title: str = ""
    text: str = ""
    chart: Chart | None = None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    changes: Sequence[str] = ()  # lines that begin with +, - or a space


def percent(part: float) -> str:
    """Return a share."""
    return f"{100 * part:.3g} %"


def describe_log(report: Given) -> str:
    """Say what the report rests on."""
    log = report["log"]
    malformed = f", {log['malformed']:,} malformed lines left out" if log["malformed"] else ""
    return f"{log['requests']:,} requests from {report['from']} until {report['until']}{malformed}."


def time_chart(title: str, timeline: Given, last: object, *series: Series) -> Chart:
    """Return a chart of a timeline."""
    return Chart(f"{title}, per {seconds(timeline['step'])}", series, str(timeline["from"]), str(last))


def seconds(number: float) -> str:
    """Return a time as a person says it."""
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if number >= size and not number % size:
            count = number / size
            return name if count == 1 else f"{count:g} {name}s"
    return f"{number:g} s"


def replay_sections(report: Given, top: int) -> list[Section]:
    """Return the report of a replay."""
    totals, timeline = report["totals"], report["timeline"]
    denied = f"{totals['denied']:,} of {totals['requests']:,} requests ({percent(totals['denied_share'])})"
    clients = f"{totals['denied_clients']:,} of {totals['clients']:,} clients"
    shown = percent(totals["denied_clients_share"])
    requests = Series("requests", timeline["requests"], "admitted")
    chart = time_chart(
        "Requests and denials", timeline, report["until"], requests, Series("denied", timeline["denied"], "denied")
    )
    limits = [
        (f"{policy['policy']}: {limit['limit']}", *(f"{number:,}" for number in (policy["requests"], limit["denied"])))
        for policy in report["policies"]
        for limit in policy["limits"]
    ]
    sections = [
        Section(f"{denied} and {clients} ({shown}) would have been denied.", describe_log(report), chart),
        Section("Limits", head=("limit", "requests", "denied"), rows=limits),
    ]
    listed = [client for client in report["clients"] if client["denied"]][:top]
    for kind, found in (
        ("client", listed),
        ("endpoint", [each for each in report["endpoints"] if each["denied"]][:top]),
    ):
        rows = [(each[kind], f"{each['requests']:,}", f"{each['denied']:,}") for each in found]
        sections.append(Section(f"Denied {kind}s", head=(kind, "requests", "denied"), rows=rows))
    return [*sections, *notes_of(report)]


def diff_sections(report: Given, top: int) -> list[Section]:
    """Return the report of a comparison."""
    denied, allowed, timeline = report["newly_denied"], report["newly_allowed"], report["timeline"]
    shares = f"{percent(denied['requests_share'])} of requests, {percent(denied['clients_share'])} of clients"
    first = f"{denied['requests']:,} requests of {denied['clients']:,} clients would newly be denied ({shares})"
    second = f"{allowed['requests']:,} requests of {allowed['clients']:,} clients would newly be allowed"
    chart = time_chart(
        "Denials by the old and the new rules", timeline, report["until"],
        Series("new", timeline["denied"], "denied"), Series("old", timeline["denied_before"], "waiting"),
    )  # fmt: skip
    sections = [Section(f"{first}; {second}.", describe_log(report), chart)]
    if denied["usd"] or allowed["usd"]:
        money = f"Money: ${denied['usd']:,.2f} newly denied, ${allowed['usd']:,.2f} newly allowed."
        sections.append(Section(text=money))
    names = ("requests", "denied", "clients", "denied_clients")
    rows = [(name.replace("_", " "), f"{report['old'][name]:,}", f"{report['new'][name]:,}") for name in names]
    changes = rules_diff(report["rules"]["old"], report["rules"]["new"])
    sections.append(Section("Rules", head=("", "old", "new"), rows=rows, changes=changes))
    for kind in ("client", "endpoint"):
        cells = [
            (each[kind], f"{each['newly_denied']:,}", f"{each['newly_allowed']:,}") for each in report[f"{kind}s"][:top]
        ]
        sections.append(Section(f"Changes by {kind}", head=(kind, "newly denied", "newly allowed"), rows=cells))
    return [*sections, *notes_of(report)]


def suggest_sections(report: Given, top: int) -> list[Section]:
    """Return a suggestion: its trade-off for each category and period."""
    if "providers" in report:
        return quota_sections(report)
    denied = report["denied"]
    title = f"Suggested limits would have denied {denied['requests']:,} requests of {denied['clients']:,} clients."
    sections = [Section(title, describe_log(report))]
    for group in report["groups"]:
        rows = [
            (
                f"{each['suggested']:,}/{each['period']}"
                if each["suggested"] is not None
                else f"none per {each['period']}",
                *(f"{each['quantiles'][name]:,}" for name in ("50", "99", "100")),
                f"{each['clients_over']:,}",
            )
            for each in group["periods"]
        ]
        heavy = f" Needed more: {', '.join(group['heavy'][:top])}." if group["heavy"] else ""
        text = f"{group['requests']:,} requests of {group['clients']:,} clients.{heavy}"
        head = ("limit", "half of the clients needed", "99 %", "the busiest", "clients over it")
        sections.append(Section(group["category"], text, head=head, rows=rows))
        for each in group["periods"]:
            points = each["tradeoff"]
            if len(points) > 1:
                over = Series("clients over the quota, %", [100 * part for _, part in points], "denied")
                ends = (f"{points[0][0]:,}", f"{points[-1][0]:,} per {each['period']}")
                sections.append(Section(chart=Chart(f"Quota per {each['period']}", [over], *ends)))
    return sections


def quota_sections(report: Given) -> list[Section]:
    """Return the suggested quotas of providers."""
    title = f"The smallest quotas with which no call would have waited longer than {seconds(report['wait'])}"
    sections = [Section(title, describe_log(report))]
    for each in report["providers"]:
        rows = [
            (limit["limit"], f"{limit['suggested']:,}", *(f"{quota:,}" for _, quota in limit["alone"]))
            for limit in each["limits"]
        ]
        waits = [f"waits up to {wait:g} s" for wait, _ in each["limits"][0]["alone"]] if rows else []
        head = ("limit", "suggested", *waits)
        sections.append(Section(each["provider"], f"{each['calls']:,} calls.", head=head, rows=rows))
    return sections


def simulation_sections(report: Given, top: int) -> list[Section]:
    """Return the outcomes of a simulation."""
    del top  # every rule is shown
    calls = f"{sum(report['offered']):,} calls in {seconds(report['duration'])}"
    rows = [
        (
            rule["rule"], f"{rule['admitted']:,}", f"{rule['denied']:,}", f"{rule['attempts']:,}",
            f"{rule['waits']['p95'] or 0:.1f} s", f"{rule['refused']:,}",
            ", ".join(f"{each['worst']:,} of {each['quota']:,}" for each in rule["bursts"]),
        )
        for rule in report["rules"]
    ]  # fmt: skip
    head = ("rule", "admitted", "denied", "attempts", "p95 wait", "refused by the hidden limit", "worst burst")
    text = f"{calls}, seed {report['seed']}."
    sections = [Section(f"Simulated: {', '.join(report['traffic'])}", text, head=head, rows=rows)]
    for rule in report["rules"]:
        series = (
            Series("calls", report["offered"], "waiting"),
            Series("admitted", rule["timeline"]["admitted"], "admitted"),
        )
        title = f"{rule['rule']}: calls and admitted calls, per {seconds(report['step'])}"
        sections.append(Section(chart=Chart(title, series, "0", seconds(report["duration"]))))
    return sections


SECTIONS: Final[Mapping[str, Callable[[Given, int], list[Section]]]] = {
    "replay": replay_sections,
    "diff": diff_sections,
    "suggest": suggest_sections,
    "simulate": simulation_sections,
}


def notes_of(report: Given) -> list[Section]:
    """Return the notes of a report."""
    return [Section(text=f"Note: {note}.") for note in report["notes"]]


def rules_diff(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the limits that differ: removed ones with a minus, added ones with a plus."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, ()), new.get(name, ())
        lines += [f"- {name}: {limit}" for limit in before if limit not in after]
        lines += [f"+ {name}: {limit}" for limit in after if limit not in before]
        lines += [f"  {name}: {limit}" for limit in after if limit in before]
    return [line.replace("`", "'") for line in lines]
