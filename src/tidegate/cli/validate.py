"""`tidegate validate`: check the file of a service and list its policies, or report what is wrong and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tidegate.cli.output import counted
from tidegate.errors import ConfigError
from tidegate.service.config.envoy_files import convert
from tidegate.service.config.schema import schema
from tidegate.service.config.settings import load_settings

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output
    from tidegate.service.config.settings import Settings


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the files, and what to do with them."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="the YAML file of a service")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the file, for editors")
    parser.add_argument(
        "--from-envoy",
        action="store_true",
        help="convert files of Envoy's rate limit service to a file of this service",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Check each file, print the schema, or convert files."""
    if args.schema:
        write_text(output, json.dumps(schema(), indent=2))
        return 0
    if not args.files:
        raise ConfigError("expected a file, such as: tidegate validate service.yaml")
    if args.from_envoy:
        text, remarks = convert(args.files)
        output.write_line(text.rstrip("\n"))
        output.write_json({"yaml": text, "remarks": remarks})
        for remark in () if output.as_json else remarks:
            output.write_error(remark)
        return 0
    for file in args.files:
        settings = load_settings(file)
        output.write_line(f"{file}: valid", "green")
        for line in describe(settings):
            output.write_line(f"  {line}")
        output.write_json({"file": file, "good": True, "policies": sorted(settings.policies.entries),
                  "domains": sorted(settings.policies.domains)})  # fmt: skip
    return 0


def describe(settings: Settings) -> list[str]:
    """Describe the policies and domains of a file."""
    lines = []
    for name, entry in settings.policies.entries.items():
        limits = ", ".join(map(str, entry.policy.limits))
        share = "" if entry.rollout >= 100 else f", enforced for {entry.rollout:g} % of keys"  # noqa: PLR2004 - percent
        mode = ", shadow" if entry.policy.mode == "shadow" else share
        more = f", {counted(len(entry.overrides), 'override')}" if entry.overrides else ""
        lines.append(f"policy {name}: {limits}{mode}{more}")
    domains = settings.policies.domains.values()
    counts = ((domain.name, sum(1 for _ in domain.variants())) for domain in domains)
    return [*lines, *(f"domain {name}: {counted(count, 'limit')}" for name, count in counts)]


def write_text(output: Output, text: str) -> None:
    """Write text that is JSON already."""
    as_json, output.as_json = output.as_json, False
    output.write_line(text)
    output.as_json = as_json
