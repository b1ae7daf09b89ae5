"""`tidegate acquire`: ask a running service for permits; the exit code says whether there were any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli import DENIED, OK
from tidegate.cli.asking import add_service, add_subject, cost_of, key_of, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.service.client import Answer

HELP = "take permits of a running service, waiting for them if asked to"


def options(parser: argparse.ArgumentParser) -> None:
    """Take whom it is about, and what it costs."""
    add_subject(parser)
    parser.add_argument("--cost", default="1", metavar="COST", help="a number, or units as in tokens=100 (1)")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="how long to wait for a permit (0)")
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Ask."""
    with open_client(args) as client:
        answer = client.acquire(args.policy, key_of(args), cost_of(args.cost), wait=args.wait)
    return told(answer, say)


def told(answer: Answer, say: Say) -> int:
    """Say what was answered."""
    if answer.allowed:
        say.line(f"allowed, {answer.remaining} left", "green")
    elif answer.retry_after is None:
        say.line(f"denied by {', '.join(answer.violated)}: more than it can ever hold", "red")
    else:
        say.line(f"denied by {', '.join(answer.violated)}, try again in {answer.retry_after:g} s", "red")
    say.data(answer.raw)
    return OK if answer.allowed else DENIED
