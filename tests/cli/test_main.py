"""The command line as a whole: help, exit codes, JSON, colours, and lazy imports."""

import json
import subprocess
import sys

import pytest

from tidegate import ConfigError, StoreUnavailable
from tidegate.cli import COMMANDS, EXIT_BAD_INPUT, EXIT_OK, EXIT_UNAVAILABLE, main
from tidegate.cli.output import Output


def test_help_lists_every_command(capsys):
    assert main([]) == EXIT_OK
    text = capsys.readouterr().out
    for name, line in COMMANDS.items():
        assert name in text
        assert line in " ".join(text.split())


def test_help_imports_no_command():
    program = (
        "import sys; from tidegate.cli import main; main([]); print([m for m in sys.modules if 'tidegate.cli.' in m])"
    )
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert text.splitlines()[-1] == "['tidegate.cli.output']"


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
        (["acquir"], "did you mean 'acquire'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["top", "--onse"], "unrecognized arguments: --onse; did you mean '--once'?"),
        (["acquire", "api", "bob", "--wait", "5"], "unrecognized arguments: --wait 5; did you mean '--timeout'?"),
        (["top", "--rows", "x"], "argument --rows: expected an integer, not 'x'"),
        (
            ["acquire", "api", "bob", "--timeout", "x"],
            "argument --timeout: expected a number of seconds such as 0.5, not 'x'",
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

    monkeypatch.setattr("tidegate.cli.demo.run", fail)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == f"tidegate: {error}\n"
    assert main(["demo", "--json"]) == code
    assert json.loads(capsys.readouterr().err) == {"error": str(error)}


def test_an_interrupt_prints_no_traceback(monkeypatch):
    def interrupt(_args, _output):
        raise KeyboardInterrupt

    monkeypatch.setattr("tidegate.cli.demo.run", interrupt)
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
