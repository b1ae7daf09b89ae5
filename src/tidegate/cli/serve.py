"""`tidegate serve`: decide for programs and proxies over the network."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tidegate.service.settings import OPTIONS, load_settings

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.service.settings import Settings

HELP = "answer rate limit questions over HTTP and gRPC"


def options(parser: argparse.ArgumentParser) -> None:
    """Take the file, and every setting by flag."""
    parser.add_argument("config", nargs="?", metavar="FILE", help="the YAML file (or TIDEGATE_CONFIG)")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME=LIMITS", help="a policy, as in 'api=100/1m, 1000/1h'"
    )
    parser.epilog = "Each setting is also read from the environment: TIDEGATE_ and its name in capitals."
    for option in OPTIONS:
        if option.secret:
            continue  # others on the machine can read a command line
        flag = "--" + option.name.replace("_", "-")
        parser.add_argument(flag, metavar=option.metavar, dest=f"set_{option.name}", help=option.help)


def settings_of(args: argparse.Namespace) -> Settings:
    """Read the settings that the command line, the environment and the file add up to."""
    flags = {option.name: getattr(args, f"set_{option.name}", None) for option in OPTIONS}
    return load_settings(
        args.config or os.environ.get("TIDEGATE_CONFIG") or None,
        flags={name: text for name, text in flags.items() if text is not None},
        policies=tuple(args.policy),
        environment=os.environ,
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from tidegate.service import logs, server  # noqa: PLC0415 - help needs neither

    logs.set_up()

    def ready(settings: Settings) -> None:
        where = f"http://{settings.listen}"
        grpc = "" if settings.grpc is None else f", for Envoy on {settings.grpc}"
        count, store = len(settings.rules.entries), shown(settings.store)
        say.line(f"answering on {where}{grpc}: {count} policies, store {store}", "bold")
        say.data({"ready": True, "http": where, "grpc": str(settings.grpc) if settings.grpc else None})

    server.run(settings_of(args), ready)
    server.leave()
    return 0


def shown(url: str) -> str:
    """Write a store's URL without what only its owner should know."""
    return re.sub(r"//[^/]*@", "//…@", url)
