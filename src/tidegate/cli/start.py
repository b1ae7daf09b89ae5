"""`tidegate start`: all of the service in one process: decisions over the network, sources by schedule, a page."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.service.settings import FOLDER, OPTIONS, load_settings
from tidegate.urls import redact

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.outbound.sources import Service as Sources
    from tidegate.service.parts import Parts
    from tidegate.service.server import Ready
    from tidegate.service.settings import Settings

HELP = "run the service: decisions by HTTP and gRPC, sources within quotas, a dashboard"


def options(parser: argparse.ArgumentParser) -> None:
    """Take the file, and every setting by flag."""
    add_settings(parser)
    parser.add_argument("--demo", action="store_true", help="with demonstration traffic, in a folder that is removed")
    parser.add_argument("--no-demo-traffic", action="store_true", help="with --demo: nobody asks but you")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Take the file of a service, and every setting by flag."""
    parser.add_argument("config", nargs="?", metavar="FILE", help="the YAML file (or TIDEGATE_CONFIG)")
    parser.add_argument(
        "--policy", action="append", default=[], metavar="NAME=LIMITS", help="a policy, as in 'api=100/1m, 1000/1h'"
    )
    parser.epilog = "Each setting is also read from the environment: TIDEGATE_ and its name in capitals."
    for option in OPTIONS:
        if not option.secret:  # others on the machine can read a command line
            action = "append" if option.many else "store"
            dest = f"set_{option.name}"
            parser.add_argument(option.flag, action=action, metavar=option.metavar, dest=dest, help=option.help)


def settings_of(args: argparse.Namespace) -> Settings:
    """Read the settings that the command line, the environment and the file add up to."""
    flags = {option.name: getattr(args, f"set_{option.name}", None) for option in OPTIONS}
    return load_settings(
        args.config or os.environ.get("TIDEGATE_CONFIG") or None,
        flags={name: text for name, text in flags.items() if text is not None},
        policies=tuple(args.policy),
        environment=os.environ,
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Take the folder of a running service's sources."""
    default = Path(os.environ.get("TIDEGATE_DATA") or FOLDER)
    parser.add_argument(
        "--data", type=Path, default=default, metavar="DIR", help=f"the service's folder (TIDEGATE_DATA, or ./{FOLDER})"
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Run until SIGTERM or Ctrl-C."""
    if args.demo:
        from tidegate.cli.showing import show  # noqa: PLC0415 - hardly anybody needs it

        show(args, say)
    else:
        wanted = settings_of(args)
        serve(wanted, lambda settings, parts: greet(settings, parts, say))
        if wanted.fetches:
            say.line("stopped; what was not fetched is queued for the next start")
    return 0


def serve(settings: Settings, ready: Ready, *, level: int = logging.INFO) -> None:
    """Serve, with logs, until SIGTERM or Ctrl-C."""
    from tidegate.service import logs, server  # noqa: PLC0415 - help needs neither

    handler = logs.set_up(level=level)
    try:
        server.run(settings, ready)
    finally:
        logs.take_down(handler)


def greet(settings: Settings, parts: Parts | None, say: Say) -> None:
    """Say what runs, and where."""
    sources = None if parts is None else parts.sources
    if sources is not None:
        list_sources(sources, say)
    where = f"http://{settings.listen}"
    grpc = "" if settings.grpc is None else f", for Envoy on {settings.grpc}"
    count = len(settings.rules.entries)
    say.line(f"answering on {where}{grpc}: {count} policies, store {redact(settings.store)}", "bold")
    said = {"ready": True, "http": where, "grpc": str(settings.grpc) if settings.grpc else None}
    if sources is not None:
        said["providers"] = [provider.name for provider in sources.gate.providers]
        said["sources"] = sorted(sources.scheduler.sources)
    say.data(said)


def list_sources(service: Sources, say: Say) -> None:
    """Say what was loaded, and what each source is limited by."""
    providers = list(service.gate.providers)
    sources = service.scheduler.sources.values()
    for provider in providers:
        say.line(f"provider {provider}")
    for source in sources:
        say.line(f"source {source.name}: {source.timetable}, {service.gate.providers.explain(source.url)}")
    say.line(f"running with {len(providers)} providers and {len(sources)} sources in {service.data}")
