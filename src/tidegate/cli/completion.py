"""`tidegate completion`: a script that lets a shell complete commands, options and their words.

It is made from the parser itself, so it knows what the commands know. Install it with
`tidegate completion bash > ~/.local/share/bash-completion/completions/tidegate`, or the like.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.cli import COMMANDS, parser_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.cli.say import Say

HELP: Final = "print a script that completes commands and options in your shell"
FILES: Final = ("FILE", "DIR", "PATH")  # what an option takes that is a name of a file


class Option(NamedTuple):
    """An option of a command: its flags, what it is for, and what may follow it."""

    flags: tuple[str, ...]
    help: str
    takes: str  # nothing, files, other
    choices: tuple[str, ...]


class Command(NamedTuple):
    """A command as a shell needs it."""

    name: str
    help: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]  # of its first argument


def options(parser: argparse.ArgumentParser) -> None:
    """Take the shell."""
    parser.add_argument("shell", choices=sorted(SHELLS), help="whose script")


def run(args: argparse.Namespace, say: Say) -> int:
    """Print the script."""
    script = SHELLS[args.shell](list(commands()))
    say.line(script.rstrip("\n"))
    say.data({"shell": args.shell, "script": script})
    return 0


def commands() -> Iterator[Command]:
    """Read every command off the parser."""
    parser = parser_of(tuple(COMMANDS))
    children = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001 - no other way to look
    for name, child in sorted(children.choices.items()):
        found = [action for action in child._actions if action.option_strings]  # noqa: SLF001 - as above
        free = [action for action in child._actions if not action.option_strings]  # noqa: SLF001 - as above
        choices = next((tuple(map(str, action.choices)) for action in free if action.choices), ())
        yield Command(name, COMMANDS[name], tuple(map(described, found)), choices)


def described(action: argparse.Action) -> Option:
    """Describe an option."""
    takes = "nothing" if action.nargs == 0 else "files" if str(action.metavar) in FILES else "other"
    help_ = (action.help or "").replace("%%", "%")
    return Option(tuple(action.option_strings), help_, takes, tuple(map(str, action.choices or ())))


# ---- the shells ------------------------------------------------------------------------------------------------------


def bash(found: list[Command]) -> str:
    """Write for bash; older ones than 4 included."""
    lines = [
        "# bash completion for tidegate",
        "_tidegate_files() { local IFS=$'\\n'; COMPREPLY=($(compgen -f -- \"$word\")); }  # names may have spaces",
        "_tidegate() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" each',
        '    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        case "$each" in -*) ;; *) command="$each"; break ;; esac',
        "    done",
        '    case "$command $before" in',
    ]
    for command in found:
        for option in command.options:
            patterns = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
            if option.choices:
                lines.append(f"        {patterns}) {words(option.choices)}; return ;;")
            elif option.takes == "other":
                lines.append(f"        {patterns}) COMPREPLY=(); return ;;")
            elif option.takes == "files":
                lines.append(f"        {patterns}) _tidegate_files; return ;;")
    lines += ["    esac", '    case "$command" in', f'        "") {words(("--help", "--version", *COMMANDS))} ;;']
    for command in found:
        flags = [flag for option in command.options for flag in option.flags]
        rest = words(command.choices) if command.choices else "_tidegate_files"
        lines.append(f'        {command.name}) case "$word" in -*) {words(flags)} ;; *) {rest} ;; esac ;;')
    return "\n".join([*lines, "    esac", "}", "complete -o filenames -F _tidegate tidegate", ""])


def words(choices: tuple[str, ...] | list[str]) -> str:
    """Write that one of these words is meant."""
    return f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word"))'


def zsh(found: list[Command]) -> str:
    """Write for zsh."""
    lines = ["#compdef tidegate", "_tidegate() {", "    local -a commands", "    commands=("]
    lines += [f"        {quoted(f'{command.name}:{command.help}')}" for command in found]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
    ]
    lines += ['    case "$words[2]" in']
    for command in found:
        specs = [spec for option in command.options for spec in zsh_specs(option)]
        rest = f"1: :({' '.join(command.choices)})" if command.choices else "*:file:_files"
        lines.append(
            f"        {command.name}) shift words; (( CURRENT-- )); _arguments {' '.join(specs)} {quoted(rest)} ;;"
        )
    return "\n".join([*lines, "    esac", "}", "compdef _tidegate tidegate", ""])


def zsh_specs(option: Option) -> Iterator[str]:
    """Write an option for zsh's _arguments."""
    about = option.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
    after = {"nothing": "", "files": ":file:_files", "other": ":value: "}[option.takes]
    if option.choices:
        after = f":value:({' '.join(option.choices)})"
    for flag in option.flags:
        yield quoted(f"*{flag}[{about}]{after}")


def fish(found: list[Command]) -> str:
    """Write for fish."""
    lines = ["# fish completion for tidegate", "complete -c tidegate -f"]
    for command in found:
        lines.append(f"complete -c tidegate -n __fish_use_subcommand -a {command.name} -d {quoted(command.help)}")
        seen = f"-n {quoted(f'__fish_seen_subcommand_from {command.name}')}"
        if command.choices:
            lines.append(f"complete -c tidegate {seen} -a {quoted(' '.join(command.choices))}")
        else:
            lines.append(f"complete -c tidegate {seen} -F")
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            takes = {"nothing": "", "files": " -r -F", "other": " -x"}[option.takes]
            choices = f" -a {quoted(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"complete -c tidegate {seen} {flags}{takes}{choices} -d {quoted(option.help)}")
    return "\n".join([*lines, ""])


def quoted(text: str) -> str:
    """Quote a text for a shell; all three understand single quotes, closed around one inside."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: Final = {"bash": bash, "zsh": zsh, "fish": fish}
