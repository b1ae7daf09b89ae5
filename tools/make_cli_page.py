"""Writes docs/reference/cli.md from the parser of the command line: every command with its options and examples.

    python tools/make_cli_page.py

A test compares the page with the parser, and fails if an argument or an option has no help.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._cli import COMMANDS, EXIT_CODES, GROUPS, build_parser
from tidegate._cli.durations import METAVAR
from tidegate._policy.setting_values import DURATION_EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._cli.parser import CommandParser

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
OPTIONS_OF_ALL: Final = ("-h", "--json")  # described once, at the top
HEAD: Final = f"""\
# Command line

`tidegate` runs the service, asks it for decisions, shows what it does, and helps you write and check configuration
files. This page is generated from the argument parser (`python tools/make_cli_page.py`), so it lists every option.
`tidegate --help` and `tidegate help COMMAND` print the same texts; `tidegate start --help` leaves out rare options.

```sh
tidegate init api                                                # writes config.yaml, with comments
tidegate explain config.yaml --request 'POST /login' --from 203.0.113.9
tidegate start --policy 'api=100/1m'                             # serves decisions on 127.0.0.1:8080
tidegate acquire api user:42 && echo allowed                     # exit code 1: denied
tidegate top                                                     # q quits; r, a, d, w and n sort
```

**Output.** On a terminal, tables fit its width, and have colours if rich is installed (the extra `cli`), unless
`NO_COLOR` is set or `TERM` is `dumb`. In a pipe, the output is plain text without colours, and nothing is shortened.
Every command accepts `--json`; with `--watch`, each update is one line of JSON. On a terminal, if the first output
takes longer than a second, a line on standard error shows that the command is still working. Errors are one line on
standard error, `tidegate: …`, or `{{"error": …}}` with `--json`.

**Durations** are written as {DURATION_EXAMPLES}. An option with the value `{METAVAR}` takes one;
a number without a unit is in seconds. Durations in the output have the same form, except in `tidegate top`:
latencies are in milliseconds (0.08 ms), and the status line is worded as on the dashboard (2 h).

**Names.** If a command, an option, a policy, a provider or a setting is unknown, the error suggests the closest one.

**The service.** Commands that call a running service take its URL from the first of these: `--url`; the data folder
in `--data`; `TIDEGATE_URL`; the data folder in `TIDEGATE_DATA`; `./tidegate-data`, if it has a file `control.json` of
the same user; `http://127.0.0.1:8080`. A service that has providers or sources uses a data folder. The token comes from
`--token-file`, or else from `TIDEGATE_TOKEN`. `sources`, `add` and `remove` need the data folder, and no URL or token.

**Live views.** `--watch` repeats a view every second, or every `{METAVAR}`: `--watch 5s`. On a terminal, `q` quits, and
`Ctrl-Z` suspends the command; the terminal is restored in any case. `tidegate top` and `tidegate swarm` are live
without it; `--once` prints them once.

| exit code | meaning |
|---|---|
"""


def find_commands() -> dict[str, CommandParser]:
    """Return the parser of each command."""
    parser = build_parser(tuple(COMMANDS), skip_missing=True)
    actions = parser._actions  # noqa: SLF001 - argparse has no public list
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - as above


def write_page() -> str:
    """Return the text of the page."""
    lines = [HEAD + "\n".join(f"| {code} | {text} |" for code, text in EXIT_CODES.items())]
    commands = find_commands()
    for title in GROUPS:
        lines.append(f"\n## {title[0].upper()}{title[1:]}")
        for name in (name for name, command in COMMANDS.items() if command.group == title):
            lines += describe_command(name, commands[name])
    return "\n".join(lines) + "\n"


def describe_command(name: str, parser: CommandParser) -> Iterator[str]:
    """Describe a command: what it does, its options by group, its examples."""
    parser.show_all_options()
    yield f"\n### tidegate {name}\n"
    yield (parser.description or "").replace("\n", " ")
    for group in parser._action_groups:  # noqa: SLF001 - argparse has no public list
        actions = [each for each in group._group_actions if not set(OPTIONS_OF_ALL) & set(each.option_strings)]  # noqa: SLF001 - as above
        if actions:
            title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", group.title)
            yield f"\n| {title} | meaning |\n|---|---|"
            yield from map(describe_action, actions)
    yield "\n```sh"
    for command, explanation in parser.examples:
        yield f"# {explanation}\n{command}"
    yield "```"


def describe_action(action: argparse.Action) -> str:
    """Describe an argument or an option in a row of a table."""
    if not action.help:
        raise SystemExit(f"{'/'.join(action.option_strings) or action.dest} has no help")
    value = "" if action.nargs == 0 else str(action.metavar or action.dest)
    value = f"[{value}]" if action.option_strings and action.nargs == "?" else value
    names = ", ".join(action.option_strings)
    text = (action.help % {"default": action.default}).replace("|", "\\|")
    return f"| `{' '.join(filter(None, (names, value)))}` | {escape(text)} |"


def escape(text: str) -> str:
    """Keep Markdown from reading a word with a star or an underscore as markup."""
    return re.sub(r"([^\s(]*[*_<>][^\s),;:]*)", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
