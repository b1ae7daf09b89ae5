"""`tidegate budget add`, `refund` and `reset`: corrections of a task budget by the person on call.

All three refund what tiers count (see `tidegate.budget._corrections`), and write a line to the audit log in the store
of the budget.
"""

from __future__ import annotations

import asyncio
import getpass
import platform
import sys
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import positive_integer, read_cost
from tidegate._runtime.suggestions import hint
from tidegate.budget._corrections import refund
from tidegate.budget._settings.tiers import CONCURRENCY, TASKS_UNIT, tier_of
from tidegate.budget._storage.sqlite import POLICY_PREFIX
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import ConfigError
from tidegate.service._decisions.audit import AuditLog, Origin

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tidegate._cli.output import Output
    from tidegate.budget import TaskBudget
    from tidegate.budget._corrections import TierRefund
    from tidegate.core._limit import Limit

ACTIONS: Final = ("add", "refund", "reset")
# By option: the actions that use it.
OPTIONS: Final = {
    "amount": ("add", "refund"),
    "tier": ("add", "reset"),
    "type": ("refund",),
    "cost": ("refund",),
    "reason": ACTIONS,
    "yes": ("reset",),
}
SHOWING_OPTIONS: Final = ("by", "providers", "watch")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the action and its options."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        metavar="ACTION",
        help="add: allow N more tasks now, or N more of the unit of --tier; refund: N counted tasks do not count; "
        "reset: nothing that was counted so far counts. Without an action, show the tiers",
    )
    parser.add_argument("amount", nargs="?", type=positive_integer, metavar="N", help="for add and refund: how many")
    group = parser.add_argument_group("add, refund and reset")
    group.add_argument(
        "--tier", metavar="NAME", help="add, reset: only this tier, such as day (default: add: all tiers of tasks; "
        "reset: all tiers)",
    )  # fmt: skip
    group.add_argument("--type", metavar="TYPE", help="refund: the type of the tasks, whose tiers are refunded too")
    group.add_argument("--cost", metavar="COST", help="refund: the cost of the tasks, such as tokens=1800")
    group.add_argument("--reason", metavar="TEXT", help="the reason, for the audit log")
    group.add_argument("--yes", action="store_true", help="reset: do not ask for confirmation")


def refuse_unused_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that the action does not use, and for a missing amount."""
    for name, actions in OPTIONS.items():
        if getattr(args, name) and args.action not in actions:
            field = "N" if name == "amount" else f"--{name}"
            allowed = " and ".join(f"'tidegate budget {action}'" for action in actions)
            raise ConfigError(f"is an option of {allowed}", field=field)
    for name in SHOWING_OPTIONS:
        if args.action is not None and getattr(args, name):
            raise ConfigError(f"cannot be combined with {args.action}", field=f"--{name}")
    if args.action == "add" and args.amount is None:
        raise ConfigError("expected how many permits to add, such as: tidegate budget add 50 --tier day", field="N")
    if args.action == "refund" and args.amount is None and args.cost is None:
        raise ConfigError("expected a number of tasks, or --cost, such as: tidegate budget refund 5", field="N")


def run(args: argparse.Namespace, budget: TaskBudget, output: Output) -> int:
    """Correct the budget, and write what has changed."""
    if budget.operations.store.instant:
        raise ConfigError("counts in the memory of each process: a command cannot correct that", field="store")
    wanted = read_wanted(args, budget)
    if args.action == "reset" and not args.yes and not confirm(args, budget, output):
        output.write_line("nothing was changed")
        return 0
    corrections = refund(budget, wanted)
    write_audit(args, budget, corrections)
    for tier, correction in corrections.items():
        output.write_line(describe(tier, correction))
    tiers = {tier: {"refunded": each.refunded, **each.usage._asdict()} for tier, each in corrections.items()}
    output.write_json({"ok": True, "action": args.action, "budget": budget.settings.name, "tiers": tiers})
    return 0


def read_wanted(args: argparse.Namespace, budget: TaskBudget) -> Callable[[Limit], int]:
    """Return what the arguments want to refund at each limit; raises ConfigError if that is nothing at any."""
    plan = budget.operations.plan
    if args.action == "refund":
        cost = read_unit_costs(args.cost)
        budget.settings.check_task(args.type, cost)
        charges = plan.charges(args.amount or 0, args.type, cost, 0)
        counted = [tier for tier in plan.tiers if charges.get(tier.unit)]
        if not counted:
            units = ", ".join(sorted({tier.unit for tier in plan.tiers if tier.name != CONCURRENCY}))
            raise ConfigError(f"no tier counts this: the tiers of the budget count {units}", field="refund")
        return lambda limit: charges.get(limit.unit, 0)
    amount = MAX_INTEGER if args.amount is None else args.amount
    tiers = find_tiers(args, budget)
    return lambda limit: amount if tier_of(limit.name) in tiers else 0


def read_unit_costs(text: str | None) -> dict[str, int]:
    """Read `--cost`: an amount for each unit."""
    cost = {} if text is None else read_cost(text)
    if isinstance(cost, int):
        raise ConfigError(f"expected units such as tokens=1800, not {text!r}", field="--cost")
    return dict(cost)


def find_tiers(args: argparse.Namespace, budget: TaskBudget) -> list[str]:
    """Return the tier of `--tier`; by default all tiers of tasks to add to, and all tiers to reset."""
    tiers = [tier for tier in budget.operations.plan.tiers if tier.name != CONCURRENCY]
    names = [tier.name for tier in tiers]
    if args.tier == CONCURRENCY:
        message = "counts running tasks, so it cannot be corrected: a slot is free when its task ends"
        raise ConfigError(f"{CONCURRENCY} {message}, or after batch_ttl", field="--tier")
    if args.tier is not None and args.tier not in names:
        message = f"unknown tier {args.tier!r}: the budget has {', '.join(names)}{hint(args.tier, names)}"
        raise ConfigError(message, field="--tier")
    if args.tier is not None:
        return [args.tier]
    found = names if args.action == "reset" else [tier.name for tier in tiers if tier.unit == TASKS_UNIT]
    if not found:
        raise ConfigError(f"no tier counts tasks: name one of {', '.join(names) or 'none'}", field="--tier")
    return found


def confirm(args: argparse.Namespace, budget: TaskBudget, output: Output) -> bool:
    """Ask on the terminal whether to reset; raises ConfigError if there is none."""
    tiers = ", ".join(find_tiers(args, budget))
    if output.as_json or not sys.stdin.isatty():
        raise ConfigError(f"would reset {tiers}; without a terminal to ask on, confirm it with --yes", field="reset")
    output.end_progress()
    storage = budget.settings.shown_store
    answer = input(f"Reset the usage of {tiers} of the budget {budget.settings.name!r} in {storage}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def describe(tier: str, correction: TierRefund) -> str:
    """Describe what has changed at a tier; it may be less than was wanted."""
    wanted, refunded, usage = correction
    left = f"{usage.used:,} of {usage.quota:,} {usage.unit} used, {usage.remaining:,} left"
    if wanted in (refunded, MAX_INTEGER):
        return f"{tier}: refunded {refunded:,}; {left}"
    return f"{tier}: refunded {refunded:,} of {wanted:,}, because no more was counted by completed tasks; {left}"


def write_audit(args: argparse.Namespace, budget: TaskBudget, corrections: dict[str, TierRefund]) -> None:
    """Write who made the correction, and why, to the audit log in the store of the budget."""
    key: Any = tuple(corrections)
    amounts = ", ".join(f"{tier} {each.refunded}" for tier, each in corrections.items())
    reason = f"{amounts}: {args.reason}" if args.reason else amounts
    log = AuditLog(budget.operations.store)
    policy = f"{POLICY_PREFIX}{budget.settings.name}"
    origin = Origin(read_user(), platform.node(), reason)
    asyncio.run(log.add(args.action, policy, key[0] if len(key) == 1 else key, origin))


def read_user() -> str:
    """Return the name of the user; empty if the system does not know it."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
