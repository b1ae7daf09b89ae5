"""`tidegate start`: run the service: decisions over the network, scheduled sources, and the dashboard."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from tidegate._cli.extras import check_service
from tidegate._cli.output import counted
from tidegate._cli.parser import CommandParser
from tidegate._policy.declared_settings import COMMON_GROUP
from tidegate._runtime.urls import MAX_URL_LENGTH, redact
from tidegate.errors import ConfigError
from tidegate.service._config.settings import OPTIONS, load_settings

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.outbound.sources import SourceRunner
    from tidegate.service._config.settings import Settings
    from tidegate.service._runtime.components import Components
    from tidegate.service._runtime.server import Ready

EXAMPLES: Final = (
    ("tidegate start --demo", "demonstration traffic in a temporary folder, with the dashboard"),
    ("tidegate init service && tidegate start service.yaml", "write a file, and run the service with it"),
    ("tidegate start service.yaml --store redis://cache --workers 4", "four processes that share a store"),
)
ENVIRONMENT_HELP: Final = (
    "Each setting is also read from the environment: TIDEGATE_ and its name in\ncapitals, such as TIDEGATE_LISTEN."
)
SETTING_GROUPS: Final = tuple(dict.fromkeys(option.group for option in OPTIONS if not option.secret))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file, an option for every setting, and the demonstration."""
    parser.description = (
        "Run the service: decisions over HTTP, gRPC and RESP, scheduled sources, the egress gateway, and a dashboard. "
        "All settings can also be set in FILE; when FILE changes, the service reloads its policies and domains."
    )
    add_settings_options(parser)
    group = parser.add_argument_group("demonstration")
    group.add_argument("--demo", action="store_true", help="run with demonstration traffic, in a temporary folder")
    group.add_argument("--no-demo-traffic", action="store_true", help="with --demo: send no demonstration traffic")
    if isinstance(parser, CommandParser):
        parser.leave_out({title for title in SETTING_GROUPS if title != COMMON_GROUP})


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Add the file of a service, and an option for every setting."""
    if isinstance(parser, CommandParser):
        parser.notes.append(ENVIRONMENT_HELP)
    parser.add_argument(
        "config", nargs="?", metavar="FILE", help="the YAML file of the service (default: TIDEGATE_CONFIG, if set)"
    )
    groups = {title: parser.add_argument_group(title) for title in SETTING_GROUPS}
    groups[COMMON_GROUP].add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME=LIMITS",
        help="such as 'api=100/1m, 1000/1h' (may be repeated)",
    )
    for option in OPTIONS:
        if not option.secret:  # other users of the machine can read a command line
            action = "append" if option.many else "store"
            dest = f"set_{option.name}"
            group = groups[option.group]
            group.add_argument(option.flag, action=action, metavar=option.kind.metavar, dest=dest, help=option.help)


def read_settings(args: argparse.Namespace) -> Settings:
    """Read the settings from the command line, the environment and the file."""
    flags = {option.name: getattr(args, f"set_{option.name}", None) for option in OPTIONS}
    return load_settings(
        args.config or os.environ.get("TIDEGATE_CONFIG") or None,
        flags={name: text for name, text in flags.items() if text is not None},
        policies=tuple(args.policy),
        environment=os.environ,
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the service until SIGTERM or Ctrl-C."""
    if args.demo:
        from tidegate._cli.demo_service import run_demo  # noqa: PLC0415 - rarely needed

        run_demo(args, output)
    elif args.no_demo_traffic:
        raise ConfigError("only applies to the demonstration: add --demo", field="--no-demo-traffic")
    else:
        requested = read_settings(args)
        serve(requested, lambda settings, components: write_started(settings, components, output))
        if requested.runs_sources:
            output.write_line("stopped; sources that were not fetched are queued for the next start")
    return 0


def serve(settings: Settings, ready: Ready, *, level: int = logging.INFO) -> None:
    """Serve, with logging, until SIGTERM or Ctrl-C."""
    check_service(settings)
    from tidegate.service._runtime import logs, server  # noqa: PLC0415 - not needed for --help

    handler = logs.set_up(level=level)
    try:
        server.run(settings, ready)
    finally:
        logs.tear_down(handler)


def write_started(settings: Settings, components: Components | None, output: Output) -> None:
    """Write what runs, and on which addresses."""
    runner = None if components is None else components.sources
    if runner is not None:
        write_sources(runner, output)
    url = f"http://{settings.listen}"
    others = "" if settings.grpc is None else f", for Envoy on {settings.grpc}"
    others += "" if settings.resp is None else f", for Redis clients on {settings.resp}"
    others += "" if settings.egress is None else f", egress on {settings.egress}"
    policies = counted(len(settings.policies.entries), "policy", "policies")
    stores = {"store": redact(settings.store, max_length=MAX_URL_LENGTH)}
    if settings.runs_sources:  # several workers have no store in memory: they count permits in the store of the service
        stores["permits"] = stores["store"] if runner is None else redact(runner.store_url, max_length=MAX_URL_LENGTH)
    permits = f", permits of providers in {stores['permits']}" if "permits" in stores else ""
    output.write_line(f"listening on {url}{others}: {policies}, store {stores['store']}{permits}", "bold")
    status: dict[str, object] = {
        "ready": True,
        "http": url,
        "grpc": str(settings.grpc) if settings.grpc else None,
        **stores,
    }
    status["egress"] = f"http://{settings.egress}" if settings.egress else None
    status["resp"] = str(settings.resp) if settings.resp else None
    if runner is not None:
        status["providers"] = [provider.name for provider in runner.gate.providers]
        status["sources"] = sorted(runner.scheduler.sources)
    output.write_json(status)


def write_sources(runner: SourceRunner, output: Output) -> None:
    """Write the providers, and the sources with their limits."""
    providers = list(runner.gate.providers)
    sources = runner.scheduler.sources.values()
    for provider in providers:
        output.write_line(f"provider {provider}")
    for source in sources:
        schedule = f"{runner.scheduler.schedule_of(source)}{'' if source.schedule else ' (default)'}"
        output.write_line(f"source {source.name}: {schedule}, {runner.gate.providers.explain(source.url)}")
    running = f"{counted(len(providers), 'provider')} and {counted(len(sources), 'source')}"
    output.write_line(f"running with {running} in {runner.data}")
