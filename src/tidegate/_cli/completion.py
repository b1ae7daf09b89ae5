"""`tidegate completion`: print a script that completes commands, options and their values in a shell.

The script is generated from the parser, so it is always complete. Install it, for example, with
`tidegate completion bash > ~/.local/share/bash-completion/completions/tidegate`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._cli import COMMANDS, build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._cli.output import Output

FILE_METAVARS: Final = ("FILE", "DIR", "PATH")  # metavars of options that take the name of a file

EXAMPLES: Final = (
    ('eval "$(tidegate completion bash)"', "in ~/.bashrc"),
    ("tidegate completion fish > ~/.config/fish/completions/tidegate.fish", "once, for fish"),
)


class CompletionOption(NamedTuple):
    """An option of a command: its flags, its help, and the values it takes."""

    flags: tuple[str, ...]
    help: str
    takes: str  # nothing, files, other
    choices: tuple[str, ...]


class CompletionCommand(NamedTuple):
    """A command, with what a shell needs to complete it."""

    name: str
    help: str
    options: tuple[CompletionOption, ...]
    choices: tuple[str, ...]  # values of its first argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=sorted(SHELLS), help="the shell: " + ", ".join(sorted(SHELLS)))


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the script."""
    script = SHELLS[args.shell](list(read_commands()))
    output.write_line(script.rstrip("\n"))
    output.write_json({"shell": args.shell, "script": script})
    return 0


def read_commands() -> Iterator[CompletionCommand]:
    """Read every command from the parser."""
    parser = build_parser(tuple(COMMANDS), skip_missing=True)
    children = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001 - argparse has no public list
    for name, child in sorted(children.choices.items()):
        child.show_all_options()
        options = [action for action in child._actions if action.option_strings]  # noqa: SLF001 - as above
        arguments = [action for action in child._actions if not action.option_strings]  # noqa: SLF001 - as above
        choices = next((tuple(map(str, action.choices)) for action in arguments if action.choices), ())
        yield CompletionCommand(name, COMMANDS[name].help, tuple(map(read_option, options)), choices)


def read_option(action: argparse.Action) -> CompletionOption:
    """Read an option of a command."""
    takes = "nothing" if action.nargs == 0 else "files" if str(action.metavar) in FILE_METAVARS else "other"
    help_ = (action.help or "").replace("%%", "%")
    return CompletionOption(tuple(action.option_strings), help_, takes, tuple(map(str, action.choices or ())))


# ---- the shells ------------------------------------------------------------------------------------------------------


def bash_script(commands: list[CompletionCommand]) -> str:
    """Write the script for bash, including versions before 4."""
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
    for command in commands:
        for option in command.options:
            patterns = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
            if option.choices:
                lines.append(f"        {patterns}) {compgen(option.choices)}; return ;;")
            elif option.takes == "other":
                lines.append(f"        {patterns}) COMPREPLY=(); return ;;")
            elif option.takes == "files":
                lines.append(f"        {patterns}) _tidegate_files; return ;;")
    lines += ["    esac", '    case "$command" in', f'        "") {compgen(("--help", "--version", *COMMANDS))} ;;']
    for command in commands:
        flags = [flag for option in command.options for flag in option.flags]
        rest = compgen(command.choices) if command.choices else "_tidegate_files"
        lines.append(f'        {command.name}) case "$word" in -*) {compgen(flags)} ;; *) {rest} ;; esac ;;')
    return "\n".join([*lines, "    esac", "}", "complete -o filenames -F _tidegate tidegate", ""])


def compgen(choices: tuple[str, ...] | list[str]) -> str:
    """Write the bash command that completes one of these words."""
    return f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word"))'


def zsh_script(commands: list[CompletionCommand]) -> str:
    """Write the script for zsh."""
    lines = ["#compdef tidegate", "_tidegate() {", "    local -a commands", "    commands=("]
    lines += [f"        {quote(f'{command.name}:{command.help}')}" for command in commands]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
    ]
    lines += ['    case "$words[2]" in']
    for command in commands:
        specs = [spec for option in command.options for spec in zsh_specs(option)]
        rest = f"1: :({' '.join(command.choices)})" if command.choices else "*:file:_files"
        lines.append(
            f"        {command.name}) shift words; (( CURRENT-- )); _arguments {' '.join(specs)} {quote(rest)} ;;"
        )
    return "\n".join([*lines, "    esac", "}", "compdef _tidegate tidegate", ""])


def zsh_specs(option: CompletionOption) -> Iterator[str]:
    """Write the arguments of zsh's _arguments for an option."""
    description = option.help.replace("[", "(").replace("]", ")").replace(":", "\\:")
    value = {"nothing": "", "files": ":file:_files", "other": ":value: "}[option.takes]
    if option.choices:
        value = f":value:({' '.join(option.choices)})"
    for flag in option.flags:
        yield quote(f"*{flag}[{description}]{value}")


def fish_script(commands: list[CompletionCommand]) -> str:
    """Write the script for fish."""
    lines = ["# fish completion for tidegate", "complete -c tidegate -f"]
    for command in commands:
        lines.append(f"complete -c tidegate -n __fish_use_subcommand -a {command.name} -d {quote(command.help)}")
        seen = f"-n {quote(f'__fish_seen_subcommand_from {command.name}')}"
        if command.choices:
            lines.append(f"complete -c tidegate {seen} -a {quote(' '.join(command.choices))}")
        else:
            lines.append(f"complete -c tidegate {seen} -F")
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            takes = {"nothing": "", "files": " -r -F", "other": " -x"}[option.takes]
            choices = f" -a {quote(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"complete -c tidegate {seen} {flags}{takes}{choices} -d {quote(option.help)}")
    return "\n".join([*lines, ""])


def quote(text: str) -> str:
    """Quote a string for a shell. All three shells support single quotes that are closed around an inner quote."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: Final = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
