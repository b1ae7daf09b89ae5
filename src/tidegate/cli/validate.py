"""`tidegate validate`: read a service's file and say what it means, or what is wrong with it and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError
from tidegate.service.convert import convert
from tidegate.service.schema import schema
from tidegate.service.settings import load_settings

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.service.settings import Settings

HELP = "check a service's file, or convert one of Envoy's rate limit service"


def options(parser: argparse.ArgumentParser) -> None:
    """Take files."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="the YAML file of a service")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the file, for editors")
    parser.add_argument(
        "--from-envoy", action="store_true", help="the files are those of Envoy's rate limit service: print ours"
    )


def run(args: argparse.Namespace, say: Say) -> int:
    """Check each file."""
    if args.schema:
        write(say, json.dumps(schema(), indent=2))
        return 0
    if not args.files:
        raise ConfigError("name a file, such as: tidegate validate service.yaml")
    if args.from_envoy:
        text, remarks = convert(args.files)
        say.line(text.rstrip("\n"))
        say.data({"yaml": text, "remarks": remarks})
        for remark in () if say.as_json else remarks:
            say.error(remark)
        return 0
    for file in args.files:
        settings = load_settings(file)
        say.line(f"{file}: good", "green")
        for line in told(settings):
            say.line(f"  {line}")
        say.data({"file": file, "good": True, "policies": sorted(settings.rules.entries),
                  "domains": sorted(settings.rules.domains)})  # fmt: skip
    return 0


def told(settings: Settings) -> list[str]:
    """Say what a file means."""
    lines = []
    for name, entry in settings.rules.entries.items():
        limits = ", ".join(map(str, entry.policy.limits))
        share = "" if entry.rollout >= 100 else f", enforced for {entry.rollout:g} % of keys"  # noqa: PLR2004 - percent
        mode = ", shadow" if entry.policy.mode == "shadow" else share
        more = f", {len(entry.overrides)} overrides" if entry.overrides else ""
        lines.append(f"policy {name}: {limits}{mode}{more}")
    domains = settings.rules.domains.values()
    return [*lines, *(f"domain {domain.name}: {sum(1 for _ in domain.variants())} limits" for domain in domains)]


def write(say: Say, text: str) -> None:
    """Print a text that is already in the form that was asked for."""
    as_json, say.as_json = say.as_json, False
    say.line(text)
    say.as_json = as_json
