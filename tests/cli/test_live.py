"""Live views on a real terminal (a pty): q quits, keys sort, and the terminal is restored however the command ends."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from contextlib import contextmanager

import pytest

from tests.servers.process import until
from tests.service.harness import serving
from tidegate._cli import main
from tidegate._cli.keyboard import Keyboard
from tidegate._cli.live import watch
from tidegate._cli.output import CLEAR_SCREEN, Output
from tidegate._cli.progress import Progress
from tidegate.testing import ManualClock

RULES = "policies: {alpha: 3/1h fixed_window, beta: 100/1h}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service"), RULES) as running:
        running.get("/v1/overview")
        for policy in ("beta", "beta", "beta", "beta", "beta", "alpha", "alpha", "alpha", "alpha"):
            running.post("acquire", {"policy": policy, "key": "k"})
        yield running


class Terminal:
    """A command that runs on a terminal of its own."""

    def __init__(self, *arguments, **variables):
        self.main, other = pty.openpty()
        self.before = termios.tcgetattr(other)
        self.other = other
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40", "NO_COLOR": "", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidegate", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            process_group=0,  # a shell does this too: a group that can be stopped
        )
        os.set_blocking(self.main, False)
        self.text = ""

    def read(self):
        try:
            self.text += os.read(self.main, 65_536).decode("utf-8", "replace")
        except BlockingIOError:
            pass
        except OSError:  # the other side is closed
            pass
        return self.text

    def shows(self, text, since=0):
        until(lambda: text in self.read()[since:], f"{text!r} on the terminal", 60)

    def shows_order(self, policies):
        """Wait for this order: the first screens may have counts from before the calls."""
        until(lambda: order(self.read()) == policies, f"the order {policies}", 60)

    def press(self, key):
        at = len(self.read())
        os.write(self.main, key.encode())
        return at

    @property
    def mode(self):
        return termios.tcgetattr(self.other)

    def ended(self):
        self.read()  # a full buffer would stop it
        return self.process.poll() is not None

    def wait(self):
        until(self.ended, "the end of the command", 60)
        return self.process.returncode


@contextmanager
def on_terminal(*arguments, **variables):
    terminal = Terminal(*arguments, **variables)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait(10)
        os.close(terminal.main)
        os.close(terminal.other)


def order(text):
    """Return the policies of the last screen in their order."""
    screen = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text.rpartition(CLEAR_SCREEN)[2])
    rows = re.findall(r"^(alpha|beta) ", screen.replace("\r", ""), re.MULTILINE)
    return rows[:2]


def test_q_quits_and_keys_sort(service):
    with on_terminal("top", "--url", service.url, "--interval", "500ms") as terminal:
        terminal.shows("q quits  sort by r:[rate]")
        assert not terminal.mode[3] & (termios.ICANON | termios.ECHO)
        for key, name, expected in (
            ("d", "d:[denied]", ["alpha", "beta"]),
            ("a", "a:[admitted]", ["beta", "alpha"]),
            ("n", "n:[name]", ["alpha", "beta"]),
        ):
            at = terminal.press(key)
            terminal.shows(name, at)
            terminal.shows_order(expected)
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.mode == terminal.before
        assert "\x1b[1m" in terminal.text  # rich is installed


@pytest.mark.once("2-130")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGHUP, 128 + 1), (signal.SIGINT, 130)]
)
def test_the_terminal_is_restored_after_a_signal(service, number, code):
    with on_terminal("usage", "beta", "k", "--watch", "--url", service.url) as terminal:
        terminal.shows("q quits")
        assert terminal.mode != terminal.before
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.mode == terminal.before


def test_the_terminal_is_restored_after_an_error(tmp_path):
    with (
        serving(tmp_path, RULES) as service,
        on_terminal("top", "--interval", "100ms", "--url", service.url) as terminal,
    ):
        terminal.shows("q quits")
        service.stop()
        assert terminal.wait() == 3
        assert terminal.mode == terminal.before
        assert "tidegate: cannot reach a service at" in terminal.text


@pytest.mark.slow
def test_suspending_restores_the_terminal_and_continuing_reads_keys_again(service):
    with on_terminal("top", "--url", service.url, "--interval", "200ms") as terminal:
        terminal.shows("q quits")
        terminal.process.send_signal(signal.SIGTSTP)
        until(lambda: terminal.mode == terminal.before, "the terminal as it was", 60)
        terminal.process.send_signal(signal.SIGCONT)
        until(lambda: terminal.mode != terminal.before, "keys again", 60)
        at = terminal.press("n")
        terminal.shows("n:[name]", at)
        terminal.press("q")
        assert terminal.wait() == 0


def test_no_color_is_honoured_on_a_terminal(service):
    with on_terminal("top", "--once", "--url", service.url, NO_COLOR="1") as terminal:
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.read()
        lines = terminal.text.replace("\r", "").splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("policy ") for line in lines)


def test_a_repeated_view_in_a_pipe_is_appended(service, capsys):
    output, clock = Output(), ManualClock(start=0)
    watch(lambda: output.write_line("view"), output, 5.0, clock=clock, rounds=3)
    assert capsys.readouterr().out == "view\n" * 3
    assert clock.now() == 10


def test_a_repeated_view_writes_one_json_document_per_line(service, capsys, monkeypatch):
    shown = []

    def twice(show, output, interval, **_options):
        shown.append(interval)
        show()
        show()

    monkeypatch.setattr("tidegate._cli.policies.watch", twice)
    assert main(["policies", "--watch", "2s", "--json", "--url", service.url]) == 0
    assert shown == [2.0]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_without_a_terminal_no_key_is_read(monkeypatch):
    clock = ManualClock(start=0)
    with Keyboard(clock, enabled=False) as keyboard:
        assert not keyboard.active
        assert keyboard.read(7.0) == ""
    assert clock.now() == 7


# ---- progress --------------------------------------------------------------------------------------------------------


class Stream(io.StringIO):
    """A stream that counts its writes."""


def test_progress_is_shown_after_a_second():
    stream, clock = Stream(), ManualClock(start=100)
    progress = Progress("waiting for permits", stream, clock)
    clock.advance(0.5)
    assert stream.getvalue() == ""
    until(lambda: clock.advance(1) or "waiting for permits, " in stream.getvalue(), "the line", 60)
    progress.end()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_quick_command_shows_no_progress():
    stream = Stream()
    Progress("calling the service", stream, ManualClock(start=100)).end()
    assert stream.getvalue() == ""


@pytest.mark.slow
def test_progress_of_a_waiting_command(service):
    """The exhausted policy would allow the call in an hour."""
    with on_terminal("acquire", "alpha", "k", "--timeout", "2500ms", "--url", service.url) as terminal:
        terminal.shows("waiting for permits, 1s")
        assert terminal.wait() == 1
        terminal.shows("denied by 1h, try again in ")


def test_a_pipe_gets_no_progress(service):
    command = [sys.executable, "-m", "tidegate", "acquire", "alpha", "k", "--timeout", "1200ms", "--url", service.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("denied by 1h, try again in ")
