"""The help and its page: groups, examples that can be run, no wide lines; docs/reference/cli.md has every option."""

import argparse
import re
import shlex

import pytest

from tests.cases import cases
from tidegate._cli import COMMANDS, EXAMPLES, build_parser, main
from tidegate._policy.config_value import ConfigValue
from tidegate.service._config.settings import OPTIONS
from tools.make_cli_page import (
    PAGE,
    describe_command,
    find_commands,
    write_page,
)

PARSERS = find_commands()
NO_PROGRESS = {"init", "start", "demo", "completion"}  # they answer at once, or write logs while they start


@pytest.mark.parametrize("columns", ["80", "60"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    if name:
        with pytest.raises(SystemExit):
            main([name, "--help"])
    else:
        main([])
    text = capsys.readouterr().out
    head = text.partition("examples:")[0]
    assert max(map(len, head.splitlines())) <= (int(columns) if name else 80), text
    assert "\nexamples:\n" in text


def test_the_page_is_what_the_parser_says():
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run: make reference"


def test_every_argument_and_option_has_help():
    for name, parser in PARSERS.items():
        for action in parser._actions:  # noqa: SLF001 - argparse has no public list
            assert action.help, (name, action.option_strings or action.dest)


def test_an_option_without_help_is_refused():
    parser = PARSERS["reset"]
    parser.add_argument("--undocumented")
    try:
        with pytest.raises(SystemExit, match="--undocumented has no help"):
            list(describe_command("reset", parser))
    finally:
        action = parser._option_string_actions.pop("--undocumented")  # noqa: SLF001 - as above
        parser._remove_action(action)  # noqa: SLF001 - as above


ALL_EXAMPLES = [
    (name, command)
    for name, examples in [("", EXAMPLES), *((name, parser.examples) for name, parser in PARSERS.items())]
    for command, _ in examples
]


@cases(("name", "command"), ALL_EXAMPLES)
def test_examples_are_accepted_by_the_parser(name, command):
    parts = re.split(r"\s*(?:&&|\||>)\s*(?=(?:[^']*'[^']*')*[^']*$)", command)  # outside quotes
    tidegate = [part for part in parts if part.startswith("tidegate ")]
    if not tidegate:  # eval "$(tidegate completion bash)"
        tidegate = re.findall(r"\$\((tidegate [^)]*)\)", command)
    assert tidegate
    for part in tidegate:
        arguments = shlex.split(part)[1:]
        args = build_parser(arguments).parse_args(arguments)
        assert not name or args.command in (name, "init")


def test_every_time_option_shares_one_metavar_and_one_parser():
    names = {
        (name, action.option_strings[-1])
        for name, parser in PARSERS.items()
        for action in parser._actions  # noqa: SLF001 - as above
        if action.metavar == "TIME"
    }
    assert {("acquire", "--timeout"), ("acquire", "--ttl"), ("block", "--for"), ("top", "--interval")} <= names
    assert {("budget", "--watch"), ("swarm", "--interval"), ("start", "--max-wait"), ("usage", "--watch")} <= names
    for parser in PARSERS.values():
        for action in parser._actions:  # noqa: SLF001 - as above
            assert "SECONDS" not in str(action.metavar), action
            if action.metavar == "TIME" and not action.dest.startswith("set_"):  # settings are read with the file's
                assert action.type is not None
                assert action.type("1h30m") == 5400.0
                assert action.type("500ms") == 0.5
                assert action.type("2") == 2.0
                with pytest.raises(argparse.ArgumentTypeError, match="such as 500ms, 30s, 5m or 1h30m, not 'soon'"):
                    action.type("soon")


@cases("option", [option for option in OPTIONS if option.kind.metavar == "TIME"])
def test_settings_read_durations_in_the_same_way(option):
    found = option.read(ConfigValue("1h30m", field=option.flag)) if option.name != "lease" else 5400.0
    assert found == 5400.0


def test_views_can_be_repeated():
    repeated = {name for name, parser in PARSERS.items() if "--watch" in parser._option_string_actions}  # noqa: SLF001 - as above
    assert repeated == {"budget", "block", "peek", "policies", "sources", "usage"}


def test_commands_that_may_take_a_second_say_what_they_do():
    assert {name for name, command in COMMANDS.items() if not command.progress} == NO_PROGRESS


def read_help(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_the_help_of_start_fits_a_screen_and_help_all_has_every_option(capsys):
    brief, full = read_help(capsys, "start", "--help"), read_help(capsys, "start", "--help-all")
    assert len(brief.splitlines()) <= 45
    assert {option.flag for option in OPTIONS if not option.secret} <= set(full.split())
    assert "--max-connections" not in brief
    assert "--help-all" in brief


@pytest.mark.parametrize("name", ["", "peek", "start"])
def test_help_is_a_command(name, capsys):
    asked = ["help", name] if name else ["help"]
    shown = read_help(capsys, *asked)
    assert shown == read_help(capsys, *([name, "--help"] if name else ["--help"]))


def test_help_for_an_unknown_command_suggests_one(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["help", "peak"])
    assert exit_.value.code == 2
    assert "did you mean 'peek'?" in capsys.readouterr().err
