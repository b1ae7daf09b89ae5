"""What the dashboard says in its first line: who is limited, why, and what that means for callers.

`find_all` is a pure function of the data of /v1/overview. Each finding is one sentence with its consequence; the worst
comes first. The page adds the time (`since`) in the time zone of its reader.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tidegate._policy import Key

    Overview = Mapping[str, Any]

BAD, WARNING, GOOD = "bad", "warn", "good"
LEVELS: Final = (BAD, WARNING, GOOD)
MIN_DENIED: Final = 10  # calls in the last minute
RECENT_MILLISECONDS: Final = 60_000  # of the calls that are looked at
MIN_SHARE: Final = 0.05  # of all calls: below, denials are never a finding
BAD_SHARE: Final = 0.25
UNUSUAL_FACTOR: Final = 2.0  # times the usual share
MAIN_SHARE: Final = 0.4  # of the denials: a key or a policy with this share is named
BUDGET_SHARE: Final = 0.9  # of a tier
BUDGET_SECONDS: Final = 3600.0
UNRESPONSIVE_SECONDS: Final = 2.0  # since the last values of a worker
MAX_NAMES: Final = 3
MAX_NAME_LENGTH: Final = 60  # characters of a policy or key; of longer names, the start and the end are shown
NAME_END: Final = 20  # characters
KEY_SEPARATOR: Final = " \u203a "  # between the parts of a key, as on the page
EFFECTS: Final = {
    "deny": ("denies every call", "deny every call"),
    "allow": ("admits every call, without limits", "admit every call, without limits"),
    "local": ("decides with a local share of each limit", "decide with a local share of each limit"),
}  # by `on_store_error`: of one policy, and of several
FRACTIONS: Final = (
    (1.0, "All calls denied"),
    (0.95, "Nearly all calls denied"),
    (0.72, "Three quarters of all calls denied"),
    (0.62, "Two thirds of all calls denied"),
    (0.46, "Half of all calls denied"),
    (0.30, "A third of all calls denied"),
    (0.22, "A quarter of all calls denied"),
)
FRACTION_WIDTH: Final = 0.08


class StatusFinding(NamedTuple):
    """One thing that an operator should know. `policy` and `key` are what the page offers to look up."""

    kind: str
    level: str
    title: str
    detail: str = ""
    meaning: str = ""
    since: int | None = None  # milliseconds since 1970
    policy: str | None = None
    key: Key | None = None
    since_text: str = " since"  # between the title and the time

    @property
    def text(self) -> str:
        """The sentence without the time."""
        return f"{self.title}: {self.detail}" if self.detail else self.title


def find_all(overview: Overview) -> list[StatusFinding]:
    """Return what is wrong, the worst first; if nothing is, one finding that says so."""
    found = [finding for find in FINDERS for finding in find(overview)]
    found.sort(key=lambda finding: LEVELS.index(finding.level))  # stable: finders of one level keep their order
    return found or [find_normal(overview)]


# ---- decisions -------------------------------------------------------------------------------------------------------


def find_store_outage(overview: Overview) -> Iterator[StatusFinding]:
    """Find a store that is unavailable."""
    store = overview["store"]
    if not store["lost"]:
        return
    enforced = [policy for policy in overview["policies"] if policy["mode"] != "shadow"]  # others admit every call
    names = {mode: [policy["name"] for policy in enforced if policy["on_store_error"] == mode] for mode in EFFECTS}
    parts = [f"{name_policies(found)} {EFFECTS[mode][len(found) > 1]}" for mode, found in names.items() if found]
    yield StatusFinding(
        "store",
        BAD,
        "Store unavailable",
        store["kind"],
        f"Until it is available again: {'; '.join(parts) or 'every call is admitted'}.",
        store.get("lost_since"),
    )


def name_policies(names: list[str]) -> str:
    """Return the names of policies, or their number if there are many."""
    return join(names) if len(names) <= MAX_NAMES else f"{len(names)} policies"


def find_unresponsive_workers(overview: Overview) -> Iterator[StatusFinding]:
    """Find worker processes that do not publish their values."""
    silent = [worker for worker in overview["workers"] if worker["seconds_ago"] >= UNRESPONSIVE_SECONDS]
    if silent:
        title = f"{len(silent)} of {count_of(len(overview['workers']), 'worker', 'workers')} not responding"
        meaning = "Calls on its connections wait until the service replaces it, within seconds."
        yield StatusFinding("workers", BAD, title, f"process {join([str(each['id']) for each in silent])}", meaning)


def find_denials(overview: Overview) -> Iterator[StatusFinding]:
    """Find more denials than usual."""
    recent = overview["recent"]
    denied, total = recent["denied"], recent["admitted"] + recent["denied"]
    share = denied / total if total else 0.0
    if denied < MIN_DENIED or share < max(MIN_SHARE, UNUSUAL_FACTOR * recent["usual"]):
        return
    detail, meaning, policy, key = describe_denied(recent)
    by_limits = sum(denials for denials, _ in recent["policies"].values())
    if overview["store"]["lost"] and by_limits < denied / 2:
        detail, meaning, policy, key = "mostly because the store is unavailable", "", None, None
    share = max(share, recent["share"])  # of an episode that began within the minute, without the calls before it
    level = BAD if share >= BAD_SHARE else WARNING
    title, since = describe_share(share), recent["since"]
    if since is None or overview["at"] - since <= RECENT_MILLISECONDS:
        yield StatusFinding("denials", level, title, detail, meaning, since, policy, key)
    else:  # the numbers are those of a part of the time since then
        title += " in the last minute"
        yield StatusFinding("denials", level, title, detail, meaning, since, policy, key, ", more than usual since")


def describe_denied(recent: Mapping[str, Any]) -> tuple[str, str, str | None, Key | None]:
    """Return who is denied, what it means, and the policy and the key if there is a main one."""
    by_policy = sorted(recent["policies"].items(), key=lambda pair: -pair[1][0])
    total = sum(denials for _, (denials, _) in by_policy)
    if not total:
        return "", "", None, None
    row = max(recent["keys"], key=lambda each: each["denied"], default=None)
    if row is not None and row["denied"] >= MAIN_SHARE * total:
        name, percent = shorten(format_key(row["key"])), percent_of(row["denied"], total)
        detail = f"{shorten(row['policy'])}, {name} ({percent})"
        why = "blocked" if list(row["limits"]) == ["blocked"] else describe_limits(row.get("over", ()))
        meaning = (
            f"{name} is {why} and has {percent} of the denials in the last minute. Other keys have limits of their own."
        )
        return detail, meaning, row["policy"], row["key"]
    policy, (denials, keys) = by_policy[0]
    if denials >= MAIN_SHARE * total:
        percent = percent_of(denials, total)
        spread = count_of(keys, "key", "keys")
        detail = f"{shorten(policy)}, {spread} ({percent})"
        meaning = f"{shorten(policy)} has {percent} of the denials in the last minute, spread over {spread}."
        return detail, meaning, policy, None
    names = [f"{shorten(name)} ({percent_of(denials, total)})" for name, (denials, _) in by_policy[:MAX_NAMES]]
    return ", ".join(names), "Several policies deny: no single key or policy stands out.", None, None


def describe_limits(over: tuple[str, ...] | list[str]) -> str:
    """Return that a key exceeds limits: "over 5 per minute"."""
    return f"over {join(list(over))}" if over else "over its limit"


def describe_share(share: float) -> str:
    """Return a share of calls in words if it is near a simple fraction, otherwise in percent."""
    for lowest, words in FRACTIONS:
        if lowest <= share < lowest + FRACTION_WIDTH:
            return words
    return f"{share * 100:.0f} % of all calls denied"


def find_normal(overview: Overview) -> StatusFinding:
    """Say that nothing is wrong."""
    recent = overview["recent"]
    total = recent["admitted"] + recent["denied"]
    if not total:
        return StatusFinding("normal", GOOD, "No calls in the last minute", meaning="No calls are denied or waiting.")
    share = recent["denied"] / total
    if not recent["denied"]:
        return StatusFinding("normal", GOOD, "All calls admitted", meaning="No call was denied in the last minute.")
    words = "less than 1 %" if share < 0.01 else f"{share * 100:.0f} %"  # noqa: PLR2004 - one percent
    return StatusFinding(
        "normal", GOOD, "Normal", f"{words} of calls denied", "In the last minute; not more than usual."
    )


# ---- configuration and components ------------------------------------------------------------------------------------


def find_refused_file(overview: Overview) -> Iterator[StatusFinding]:
    """Find a configuration file that is invalid."""
    rules = overview["rules"]
    if rules["error"]:
        meaning = "The previous policies stay in effect until the file is corrected."
        title = "Configuration file refused"
        folder, slash, rest = rules["error"].partition(":")[0].rpartition("/")
        error = rules["error"].removeprefix(folder + slash) if rest else rules["error"]  # there is little space
        yield StatusFinding("file", WARNING, title, error, meaning, rules["since"])


def find_refused_egress_file(overview: Overview) -> Iterator[StatusFinding]:
    """Find an egress file that is invalid."""
    panel = overview["panels"].get("egress")
    rules = panel.get("rules", {}) if isinstance(panel, dict) else {}
    if rules.get("error"):
        meaning = "The previous settings of the gateway stay in effect until the file is corrected."
        yield StatusFinding("file", WARNING, "Egress file refused", rules["error"], meaning, rules["since"])


def find_bus(overview: Overview) -> Iterator[StatusFinding]:
    """Find a bus that is not connected."""
    bus = overview["panels"].get("bus")
    if isinstance(bus, dict) and not bus.get("connected", "error" not in bus):
        meaning = "Processes do not receive each other's reductions, and keep their last known capacities."
        where = bus.get("where") or bus.get("error", "")
        yield StatusFinding("bus", WARNING, "The bus is not connected", where, meaning)


def find_budgets(overview: Overview) -> Iterator[StatusFinding]:
    """Find budgets that are used up, or soon will be."""
    budgets = overview["panels"].get("budgets")
    for budget in budgets if isinstance(budgets, list) else ():
        for tier in budget["tiers"]:
            numbers = f"{budget['name']} per {tier['name']}, {tier['used']:,} of {tier['quota']:,}"
            until = f"until it resets in {format_seconds(tier['reset_after'])}"
            if tier["remaining"] <= 0:
                yield StatusFinding("budget", BAD, "A budget is used up", numbers, f"Tasks are denied {until}.")
            elif tier["runs_out_in"] is not None and tier["runs_out_in"] < min(BUDGET_SECONDS, tier["reset_after"]):
                soon = f"At this rate, tasks are denied in {format_seconds(tier['runs_out_in'])}, {until}."
                yield StatusFinding("budget", WARNING, "A budget will run out soon", numbers, soon)
            elif tier["used"] >= BUDGET_SHARE * tier["quota"]:
                yield StatusFinding(
                    "budget", WARNING, "A budget is nearly used up", numbers, f"The remaining quota must last {until}."
                )


def find_providers(overview: Overview) -> Iterator[StatusFinding]:
    """Find providers that refuse calls."""
    panel = overview["panels"].get("sources")
    for provider in panel.get("providers", ()) if isinstance(panel, dict) else ():
        quotas = [limit["quota"] for limit in provider["limits"]]
        if provider["frozen_for"] > 0:
            meaning = f"Calls to it wait for another {format_seconds(provider['frozen_for'])}."
            yield StatusFinding("provider", WARNING, "A provider refuses calls", provider["name"], meaning)
        elif provider["capacity"] not in quotas and provider["capacity"] < max(quotas, default=0):
            detail = f"{provider['name']}, reduced to {provider['capacity']:,}"
            meaning = "It refused calls: tidegate sends fewer, and raises the capacity step by step."
            yield StatusFinding("provider", WARNING, "A provider has a reduced capacity", detail, meaning)


def find_pools(overview: Overview) -> Iterator[StatusFinding]:
    """Find members of pools that refuse calls, or reject their key."""
    members = overview["panels"].get("pools")
    for member in members if isinstance(members, list) else ():
        name = f"{member['pool']}, {member['member']}"
        if member["state"] == "paused":
            meaning = f"Calls go to other members of the pool for another {format_seconds(member['frozen_for'])}."
            yield StatusFinding("provider", WARNING, "A provider refuses calls", name, meaning)
        elif member["state"] == "key rejected":
            meaning = "Calls go to other members of the pool. Replace the key of this member."
            yield StatusFinding("provider", WARNING, "A provider rejects its key", name, meaning)


def find_swarm(overview: Overview) -> Iterator[StatusFinding]:
    """Find resources of a swarm that are frozen, and the reason of the last reduction."""
    panel = overview["panels"].get("swarm")
    panel = panel if isinstance(panel, dict) else {}
    reasons = {each["resource"]: each["reason"] for each in sorted(panel.get("reductions", ()), key=itemgetter("at"))}
    frozen: dict[str, tuple[int, float]] = {}
    for agent in panel.get("agents", ()):
        for resource in agent["resources"]:
            if resource["frozen_for"] > 0:
                agents, longest = frozen.get(resource["name"], (0, 0.0))
                frozen[resource["name"]] = (agents + 1, max(longest, resource["frozen_for"]))
    for name, (agents, longest) in frozen.items():
        who = f"{count_of(agents, 'agent', 'agents')} {'sends' if agents == 1 else 'send'}"
        detail = f"{name}, {reasons[name]}" if reasons.get(name) else name
        meaning = f"{who} nothing for another {format_seconds(longest)}."
        yield StatusFinding("swarm", WARNING, "A resource of the swarm is frozen", detail, meaning)


FINDERS: Final[tuple[Callable[[Overview], Iterator[StatusFinding]], ...]] = (
    find_store_outage,
    find_unresponsive_workers,
    find_denials,
    find_refused_file,
    find_refused_egress_file,
    find_bus,
    find_budgets,
    find_providers,
    find_pools,
    find_swarm,
)  # to add a finding of a panel: one function here


# ---- words -----------------------------------------------------------------------------------------------------------


def count_of(number: int, one: str, several: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else several}"


def percent_of(part: int, total: int) -> str:
    """Return a share in percent, rounded down: 100 % is all of it, and something is never 0 %."""
    return f"{part * 100 // total} %" if part * 100 >= total else "less than 1 %"


def join(parts: list[str]) -> str:
    """Join parts: "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def format_key(key: Key | list[str]) -> str:
    """Write a key; its parts are separated as on the page."""
    return key if isinstance(key, str) else KEY_SEPARATOR.join(key)


def shorten(name: str) -> str:
    """Shorten a long name in its middle: names often differ at their ends."""
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[: MAX_NAME_LENGTH - NAME_END - 1]}…{name[-NAME_END:]}"


def format_seconds(seconds: float) -> str:
    """Write a duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
