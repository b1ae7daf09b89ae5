"""The argument parser of the command line: help in groups and with examples, and errors that suggest names."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tidegate._runtime.suggestions import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

RENAMED_OPTIONS: Final = {"--wait": "--timeout"}  # names of options in earlier versions
MAX_USAGE_OPTIONS: Final = 12  # a usage line with more options lists none
HELP_WIDTH: Final = 80


class CommandParser(argparse.ArgumentParser):
    """A parser whose help has groups of commands and examples, and whose errors suggest the most similar name."""

    command: CommandParser | None = None  # the parser of the command that the arguments name
    command_groups: Mapping[str, Mapping[str, str]] = {}
    examples: Sequence[tuple[str, str]] = ()  # a command line, and what it does

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of argparse
        """Keep the line breaks of descriptions and examples."""
        super().__init__(**{"formatter_class": HelpFormatter, **options})
        self.notes: list[str] = []  # paragraphs at the end of the help
        self._left_out: dict[argparse.Action, str] = {}  # options that `--help` leaves out, and their help

    def leave_out(self, titles: Collection[str]) -> None:
        """Leave groups of options out of `--help`; `--help-all` shows them."""
        self.add_argument("--help-all", action=FullHelpAction)
        for group in self._action_groups:
            for action in group._group_actions if group.title in titles else ():  # noqa: SLF001 - argparse has no other way
                self._left_out[action] = action.help or ""
                action.help = argparse.SUPPRESS

    def show_all_options(self) -> None:
        """Show the options in the help that `leave_out` has left out."""
        for action, text in self._left_out.items():
            action.help = text
        self._left_out.clear()

    def format_help(self) -> str:
        """Return the help: usage, commands in groups or options in groups, examples, notes."""
        self._shorten_usage()
        head, options, rest = super().format_help().rstrip().partition("\n\noptions:")
        groups = [draw_commands(title, commands) for title, commands in self.command_groups.items()]
        parts = ["\n\n".join((head, *groups)) + options + rest]
        if self.examples:
            parts.append(draw_examples(self.examples))
        if any(action.metavar == "TIME" and action.help != argparse.SUPPRESS for action in self._actions):
            from tidegate._cli.durations import HELP  # noqa: PLC0415 - imports the core

            parts.append(HELP)
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def format_usage(self) -> str:
        """Return the usage line, as in the help."""
        self._shorten_usage()
        return super().format_usage()

    def _shorten_usage(self) -> None:
        if not self.usage and len(self._option_string_actions) > MAX_USAGE_OPTIONS:
            self.usage = " ".join((self.prog, "[OPTION ...]", *self._positional_usage()))

    def _positional_usage(self) -> list[str]:
        formatter = self._get_formatter()
        actions = self._get_positional_actions()
        return [formatter._format_args(action, str(action.metavar or action.dest)) for action in actions]  # noqa: SLF001 - argparse has no other way

    def error(self, message: str) -> NoReturn:
        """Exit with an error message."""
        unrecognized = message.startswith("unrecognized arguments")
        if unrecognized and self.command is not None:
            self.command.error(message)
        wrong = ""
        known: Sequence[str] = list(self._option_string_actions)
        if command := re.search(r"argument COMMAND: invalid choice: '(.*?)'", message):
            commands = [name for group in self.command_groups.values() for name in group]
            near = did_you_mean(command[1], commands) or f"'{self.prog} --help' lists the commands"
            super().error(f"unknown command {command[1]!r}: {near}")
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            wrong, known = choice[1], tuple(re.findall(r"[\w-]+", choice[2]))
        elif option := re.search(r"unrecognized arguments:.*? (--[\w-]+)", message):
            wrong = option[1]
        renamed = RENAMED_OPTIONS.get(wrong, "")
        near = f"did you mean {renamed!r}?" if renamed in known else suggest(wrong, known)
        if unrecognized and not near:
            near = f"'{self.prog} --help' lists the {'options' if wrong.startswith('--') else 'arguments'}"
        super().error(f"{message}; {near}" if near else message)


def suggest(wrong: str, known: Sequence[str]) -> str:
    """Suggest a choice or an option; the dashes of options would make them all similar."""
    dashes = "--" if wrong.startswith("--") else ""
    names = [name.removeprefix(dashes) for name in known if name.startswith(dashes)]
    return did_you_mean(wrong.removeprefix(dashes), names, prefix=dashes)


class FullHelpAction(argparse.Action):
    """`--help-all`: prints the help with the options that `--help` leaves out."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        """Take no value."""
        help_text = "show all options, and exit"
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, nargs=0, help=help_text)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the help, and exit."""
        if isinstance(parser, CommandParser):
            parser.show_all_options()
        parser.print_help()
        parser.exit()


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Writes help that is at most 80 columns wide, without the list of commands, which has groups of its own."""

    def __init__(self, prog: str) -> None:
        """Use the width of the terminal, up to 80 columns."""
        import shutil  # noqa: PLC0415 - only for help

        super().__init__(prog, max_help_position=26, width=min(HELP_WIDTH, shutil.get_terminal_size().columns) - 1)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option or an argument, but not the list of commands."""
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no other way
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill paragraphs; a text with line breaks keeps them."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)  # noqa: SLF001 - as the base class does


def draw_commands(title: str, commands: Mapping[str, str]) -> str:
    """Draw a group of commands."""
    return "\n".join([f"{title}:", *(f"  {name:<11} {line}" for name, line in commands.items())])


def draw_examples(examples: Sequence[tuple[str, str]]) -> str:
    """Draw examples: a command, and below it what it does."""
    return "\n".join(["examples:", *(f"  {command}\n      {explanation}" for command, explanation in examples)])
