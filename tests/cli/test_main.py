"""The command line as a whole: help, exit codes, JSON, colours, and lazy imports."""

import json
import re
import subprocess
import sys

import pytest

from tidegate import ConfigError, StoreUnavailable
from tidegate._cli import COMMANDS, EXIT_BAD_INPUT, EXIT_OK, EXIT_UNAVAILABLE, main
from tidegate._cli.output import Output


def test_help_lists_every_command(capsys):
    assert main([]) == EXIT_OK
    text = capsys.readouterr().out
    for name, (_, line, _) in COMMANDS.items():
        assert name in text
        assert line in " ".join(text.split())


def test_help_imports_no_command():
    program = (
        "import sys; from tidegate._cli import main; main([]); print([m for m in sys.modules if 'tidegate._cli.' in m])"
    )
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    imported = set(re.findall(r"tidegate\._cli\.(\w+)", text.splitlines()[-1]))
    assert "output" in imported
    assert not imported & {*COMMANDS, "file_kinds", "service_args", "durations"}


def test_help_has_the_exit_codes(capsys):
    main([])
    text = capsys.readouterr().out
    for code in (EXIT_OK, 1, EXIT_BAD_INPUT, EXIT_UNAVAILABLE, 130):
        assert f"\n  {code:<6} " in text


def test_converted_files_are_written_as_json(tmp_path, capsys):
    path = tmp_path / "envoy.yaml"
    path.write_text("domain: a\ndescriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]\n")
    assert main(["validate", "--from-envoy", str(path), "--json"]) == EXIT_OK
    assert "domains" in json.loads(capsys.readouterr().out)["yaml"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == EXIT_OK
    assert "--json" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["dance"])
    assert ended.value.code == EXIT_BAD_INPUT
    assert "dance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acquir"], "tidegate: error: unknown command 'acquir': did you mean 'acquire'?"),
        (["xyzzy"], "tidegate: error: unknown command 'xyzzy': 'tidegate --help' lists the commands"),
        (["init", "apy"], "invalid choice: 'apy' "),
        (["init", "apy"], "; did you mean 'api'?"),
        (["start", "--wrokers", "2"], "unrecognized arguments: --wrokers; did you mean '--workers'?"),
        (["top", "--interval", "0"], "argument --interval: expected a duration above 0, such as 500ms, "),
        (["top", "--rows", "0"], "argument --rows: expected an integer of at least 1, not '0'"),
        (["block", "a", "b", "--for", "1m1h"], "argument --for: expected a duration such as 500ms, "),
        (["budget", "--watch", "0"], "argument --watch: expected a duration above 0, such as 500ms, "),
        (["usage", "--watch", "api", "bob"], "; write --watch after the other arguments, or --watch=1s"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (
            ["start", "--providers-dir", "p", "--source-dir", "sources"],  # `sources` is also a command
            "unrecognized arguments: --providers-dir; did you mean '--provider-dir'?",
        ),
        (["start", "--colour", "red"], "unrecognized arguments: --colour; 'tidegate start --help' lists the options"),
        (["top", "--onse"], "unrecognized arguments: --onse; did you mean '--once'?"),
        (["acquire", "api", "bob", "--wait", "5"], "unrecognized arguments: --wait 5; did you mean '--timeout'?"),
        (
            ["policies", "budget.db"],
            "tidegate policies: error: unrecognized arguments: budget.db; 'tidegate ",
        ),
        (["budget", "refnd", "5"], "argument ACTION: invalid choice: 'refnd' "),
        (["budget", "refnd", "5"], "; did you mean 'refund'?"),
        (["start", "--lsten", "8080"], "usage: tidegate start [OPTION ...] [FILE]\n"),
        (["--versoin"], "tidegate: error: unrecognized arguments: --versoin; did you mean '--version'?"),
        (["top", "--rows", "x"], "argument --rows: expected an integer, not 'x'"),
        (
            ["acquire", "api", "bob", "--timeout", "x"],
            "argument --timeout: expected a duration such as 500ms, 30s, 5m or 1h30m, not 'x'",
        ),
        (["acquire", "api", "bob", "--priority", "x"], "argument --priority: expected a number, not 'x'"),
    ],
)
def test_mistakes_in_arguments_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


EXPECTED_URL = "expected an HTTP URL such as http://127.0.0.1:8080, not"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acquire", "api", "bob", "--url", "localhost"], f"--url: {EXPECTED_URL} 'localhost'"),
        (["acquire", "api", "bob", "--url", "localhost:8080"], f"--url: {EXPECTED_URL} 'localhost:8080'"),
        (["top", "--url", "ftp://host"], f"--url: {EXPECTED_URL} 'ftp://host'"),
        (["policies", "--url", "http://"], f"--url: {EXPECTED_URL} 'http://'"),
        (
            ["policies", "--url", "http://host:99999"],
            "--url: malformed URL 'http://host:99999': a port is a number from 1",
        ),
        (["policies", "--url", "http://[::1"], "--url: malformed URL 'http://[:…': check its host"),
        (["policies", "--url", "http://a..b"], "--url: malformed URL 'http://a..b': its host is not valid"),
        (["policies", "--url", "http://ho st"], "--url: malformed URL 'http://ho st': its host is not valid"),
        (["policies", "--url", "http://xn--a"], "--url: malformed URL 'http://xn--a': its host is not valid"),
        (["top", "--url", "http://256.1.1.1"], "--url: malformed URL 'http://256.1.1.1': its host is not valid"),
        (["top", "--url", "http://host/a b"], "--url: expected a URL without a query, a fragment or spaces, such as"),
        (["top", "--url", "http://host?token=x"], "--url: expected a URL without a query, a fragment or spaces"),
        (["block", "--remove"], "--remove: expected a policy and a key, such as: tidegate block api user:42 --remove"),
        (["block", "api", "bob", "--for", "1h", "--remove"], "--for: cannot be combined with --remove"),
    ],
)
def test_invalid_values_are_refused_before_the_service_is_called(arguments, message, capsys):
    assert main(arguments) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith(f"tidegate: {message}")


def test_an_invalid_url_in_the_environment_is_named(monkeypatch, capsys):
    monkeypatch.setenv("TIDEGATE_URL", "service")
    assert main(["policies"]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == f"tidegate: TIDEGATE_URL: {EXPECTED_URL} 'service'\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("no such file", field="config"), EXIT_BAD_INPUT), (StoreUnavailable("gone"), EXIT_UNAVAILABLE)],
)
def test_errors_are_one_line_and_an_exit_code(monkeypatch, capsys, error, code):
    def fail(_args, _output):
        raise error

    monkeypatch.setattr("tidegate._cli.demo.run", fail)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == f"tidegate: {error}\n"
    assert main(["demo", "--json"]) == code
    assert json.loads(capsys.readouterr().err) == {"error": str(error)}


def test_an_interrupt_prints_no_traceback(monkeypatch):
    def interrupt(_args, _output):
        raise KeyboardInterrupt

    monkeypatch.setattr("tidegate._cli.demo.run", interrupt)
    assert main(["demo"]) == 130


def test_a_pipe_gets_no_colours(capsys):
    output = Output()
    output.write_line("hello", "red")
    assert capsys.readouterr().out == "hello\n"
    assert output.draw_bar(5, 10, 10) == "█████░░░░░"
    assert output.draw_bar(0, 10, 10) == "░░░░░░░░░░"
    assert output.draw_bar(1, 1000, 10) == "█░░░░░░░░░"
    assert output.draw_bar(20, 10, 10) == "██████████"


def test_a_terminal_gets_colours_unless_no_color_is_set(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Output().style("hello", "bold", "red") == "\x1b[1;31mhello\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Output().style("hello", "red") == "hello"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert Output().style("hello", "red") == "hello"


def test_without_rich_a_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)  # as if it were not installed
    assert Output().style("hello", "red") == "hello"
    assert Output().live
