"""`tidegate init`: write a commented configuration file to start from."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.files import make_private_folder, open_private
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

STANDARD_OUTPUT: Final = "-"


class FileTemplate(NamedTuple):
    """A file to start from: what it is, its usual name, the next commands, and other templates that it names."""

    title: str
    file: str
    next_steps: tuple[str, ...]
    needs: tuple[str, ...] = ()


TEMPLATES: Final = {
    "api": FileTemplate(
        "limits for the requests that your API receives",
        "config.yaml",
        ("tidegate explain {file} --request 'POST /login' --from 203.0.113.9",),
    ),
    "provider": FileTemplate(
        "the quota of an API that you call",
        "provider.yaml",
        (
            "change its domain, limits and key",
            "tidegate explain {file} --request 'GET https://api.example.com/v1/items'",
        ),
    ),
    "budget": FileTemplate(
        "a budget for tasks", "budget.yaml", ("tidegate budget --config {file}   (after the first task)",)
    ),
    "swarm": FileTemplate(
        "a service for a swarm of agents that share quotas",
        "swarm.yaml",
        ("nats-server -a 127.0.0.1 -js &", "tidegate start {file}", "tidegate swarm nats://127.0.0.1:4222"),
    ),
    "service": FileTemplate(
        "a service that makes decisions for programs in any language",
        "service.yaml",
        ("tidegate start {file}", "tidegate acquire api user:42   (in another terminal)"),
    ),
    "egress": FileTemplate(
        "a gateway through which programs call other APIs",
        "egress.yaml",
        (
            "change the domain, limits and key in provider.yaml",
            "tidegate egress {file}",
            "curl -i http://127.0.0.1:8090/example/   (in another terminal)",
        ),
        needs=("provider",),
    ),
}
EXAMPLES: Final = (
    ("tidegate init api", "write config.yaml"),
    ("tidegate init provider providers/openai.yaml", "write to another file"),
    ("tidegate init service - | less", "print it instead"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the kind, and the file to write."""
    parser.description = (
        "Write a commented configuration file to start from. The file works unchanged; its comments say how to use it."
    )
    kinds = "; ".join(f"{kind}: {template.title}" for kind, template in TEMPLATES.items())
    parser.add_argument("kind", nargs="?", choices=TEMPLATES, metavar="KIND", help=f"{kinds} (without it: list them)")
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="the file to write, or - to print it (default: KIND.yaml; for api, config.yaml)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the file, and say what to do next; without a kind, list the kinds."""
    if args.kind is None:
        return list_kinds(output)
    template = TEMPLATES[args.kind]
    if args.file == STANDARD_OUTPUT:
        output.write_line(read_template(args.kind).rstrip("\n"))
        output.write_json({"kind": args.kind, "text": read_template(args.kind)})
        return 0
    path = Path(args.file or template.file)
    written = [write(args.kind, path, force=args.force)]
    for kind in template.needs:
        needed = path.parent / TEMPLATES[kind].file
        if not needed.exists():  # what the user has is kept
            written.append(write(kind, needed, force=False))
    for each in written:
        output.write_line(f"wrote {each}", "green")
    steps = [f"tidegate validate {path}", *(step.format(file=path) for step in template.next_steps)]
    output.write_line("next:")
    for step in steps:
        output.write_line(f"  {step}")
    output.write_json({"kind": args.kind, "files": list(map(str, written)), "next": steps})
    return 0


def list_kinds(output: Output) -> int:
    """List the kinds of files."""
    output.write_line("usage: tidegate init KIND [FILE]", "bold")
    for kind, template in TEMPLATES.items():
        output.write_line(f"  {kind:<10} {template.title}: {template.file}")
    output.write_json({"kinds": {kind: template.title for kind, template in TEMPLATES.items()}})
    return 0


def read_template(kind: str) -> str:
    """Return the text of a template."""
    return (files("tidegate._cli") / "templates" / f"{kind}.yaml").read_text(encoding="utf-8")


def write(kind: str, path: Path, *, force: bool) -> Path:
    """Write a file; raises ConfigError if it exists or cannot be written."""
    text = read_template(kind).replace(TEMPLATES[kind].file, path.name)
    try:
        make_private_folder(path.parent)
        flags = os.O_WRONLY | (os.O_TRUNC if force else os.O_EXCL)
        with os.fdopen(open_private(path, flags), "w", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        if path.is_file():
            raise ConfigError("exists already: name another file, or replace it with --force", file=str(path)) from None
        raise ConfigError("cannot be written: it is not a file", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", file=str(path)) from None
    return path
