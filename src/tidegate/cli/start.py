"""`tidegate start`: fetch sources on their schedules, within the quotas of their providers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.outbound.sources import running
from tidegate.outbound.sources.source import shown

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.outbound.sources import Service

HELP = "run scheduled sources within the quotas of their providers"


def options(parser: argparse.ArgumentParser) -> None:
    """Say which providers and sources, and where state is kept."""
    many = {"action": "append", "type": Path, "default": []}
    parser.add_argument("--provider", metavar="FILE", help="a provider's YAML file (may be repeated)", **many)  # type: ignore[arg-type]  # of argparse
    parser.add_argument("--provider-dir", metavar="DIR", help="a folder of them (may be repeated)", **many)  # type: ignore[arg-type]  # of argparse
    parser.add_argument("--source", metavar="FILE", help="a source's YAML file (may be repeated)", **many)  # type: ignore[arg-type]  # of argparse
    parser.add_argument("--source-dir", metavar="DIR", help="a folder of them (may be repeated)", **many)  # type: ignore[arg-type]  # of argparse
    add_data(parser)
    parser.add_argument(
        "--store", metavar="URL", help="where quotas are counted (default: quota.db in the data folder)"
    )
    parser.add_argument("--bus", metavar="URL", help="where reductions of capacity are shared with other processes")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="requests under way at most (default: 8)")
    parser.add_argument(
        "--permissions",
        choices=("warn", "refuse", "ignore"),
        default="warn",
        help="what happens to a provider's file with a key that others may read (default: warn)",
    )
    parser.add_argument(
        "--stop-within", type=float, default=10.0, metavar="SECONDS", help="how long requests under way may still take"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Take the folder of the service."""
    parser.add_argument(
        "--data", type=Path, default=Path("tidegate-data"), metavar="DIR", help="the service's folder (./tidegate-data)"
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Run until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log whole URLs
    asyncio.run(
        running.run(
            providers=args.provider,
            provider_directories=args.provider_dir,
            sources=args.source,
            source_directories=args.source_dir,
            data=args.data,
            permissions=args.permissions,
            stop_within=args.stop_within,
            store=args.store,
            bus=args.bus,
            workers=args.workers,
            ready=lambda service: greet(service, say),
        )
    )
    say.line("stopped; what was not fetched is queued for the next start")
    return 0


def greet(service: Service, say: Say) -> None:
    """Say what was loaded, and what each source is limited by."""
    providers = list(service.gate.providers)
    sources = service.scheduler.sources.values()
    for provider in providers:
        say.line(f"provider {provider}")
    for source in sources:
        say.line(f"source {source.name}: {source.timetable}, {service.gate.providers.explain(source.url)}")
    say.line(f"running with {len(providers)} providers and {len(sources)} sources in {service.data}", "bold")
    rows = [{"name": source.name, "url": shown(source.url)} for source in sources]
    say.data({"running": True, "providers": [provider.name for provider in providers], "sources": rows})
