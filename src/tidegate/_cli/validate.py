"""`tidegate validate`: check configuration files of any kind and describe them, or report what is wrong and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._cli import EXIT_BAD_INPUT, EXIT_OK
from tidegate._cli.extras import check_installed
from tidegate._cli.file_kinds import KINDS, check_provider, recognise
from tidegate.errors import ConfigError
from tidegate.outbound._providers.profile_file import find_profile_files
from tidegate.service._config.envoy_files import convert

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from tidegate._cli.output import Output

EXAMPLES: Final = (
    ("tidegate validate *.yaml", "check files of any kind"),
    ("tidegate validate --schema > service.schema.json", "a JSON schema for your editor"),
    ("tidegate validate --from-envoy config.yaml > service.yaml", "convert a file of Envoy's rate limit service"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the files, and what to do with them."""
    parser.description = (
        "Check configuration files of any kind, and describe what they configure; or print a schema, or convert files "
        "of Envoy's rate limit service."
    )
    kinds = ", ".join(f"{name} ({kind.title})" for name, kind in KINDS.items())
    parser.add_argument("files", nargs="*", metavar="FILE", help="a YAML file of any kind")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help=f"kind of the files (default: detected): {kinds}")
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        type=Path,
        dest="profiles",
        metavar="PATH",
        help="YAML file or folder of profiles that provider files can name (may be repeated); not needed for profiles "
        "among the FILE arguments",
    )
    other = parser.add_argument_group("instead of checking")
    other.add_argument(
        "--schema",
        nargs="?",
        const="service",
        choices=KINDS,
        metavar="KIND",
        help="print the JSON schema of a kind of file, for editors (default: service)",
    )
    other.add_argument(
        "--from-envoy",
        action="store_true",
        help="convert files of Envoy's rate limit service to a file of this service",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Check each file, print a schema, or convert files."""
    if args.schema is not None:
        write_text(output, json.dumps(KINDS[args.schema].schema(), indent=2))
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
    kinds = {file: args.kind or recognise(file) for file in args.files}
    if "source" in kinds.values():
        check_installed("checking a source file", "sources", "cronsim", "httpx")
    own = [Path(file) for file, kind in kinds.items() if kind == "profile"]
    profiles = find_profile_files(dict.fromkeys([*args.profiles, *own]))
    valid = all(check(file, kind, output, profiles, given=args.kind is not None) for file, kind in kinds.items())
    return EXIT_OK if valid else EXIT_BAD_INPUT


def check(file: str, name: str, output: Output, profiles: Mapping[str, Path], *, given: bool) -> bool:
    """Check one file; after an error, print which kind was detected, unless the kind was `given`."""
    kind = KINDS[name]
    try:
        lines, more = check_provider(file, profiles) if name == "provider" else kind.check(file)
    except ConfigError as error:
        output.write_error(str(error))
        if not given:
            output.write_error(f"{file} was read as {kind.title}; use --kind if it is another kind of file")
        return False
    output.write_line(f"{file}: valid ({kind.title})", "green")
    for line in lines:
        output.write_line(f"  {line}")
    output.write_json({"file": file, "good": True, "kind": name, **more})
    return True


def write_text(output: Output, text: str) -> None:
    """Write text that is JSON already."""
    as_json, output.as_json = output.as_json, False
    output.write_line(text)
    output.as_json = as_json
