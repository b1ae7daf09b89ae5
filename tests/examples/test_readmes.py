"""Every example works as its README says: the commands are run in a copy of the folder, on free ports."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.process import free_port, need

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = re.compile(r"\b(8080|8081|8090|8101|8102|8103|8104)\b")
RUN_HERE = ("api", "llm", "outbound", "service", "budget", "egress")  # tests/swarm runs the other one
PREAMBLE = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"


def read_blocks(name):
    return BLOCK.findall((EXAMPLES / name / "README.md").read_text(encoding="utf-8"))


@pytest.mark.once
@pytest.mark.parametrize("name", RUN_HERE)
def test_the_commands_of_the_readme_work(name, tmp_path):
    bash = need(shutil.which("bash"), "bash", "apt-get install bash")
    need(shutil.which("curl"), "curl", "apt-get install curl")
    blocks = read_blocks(name)
    commands = [text for kind, text in blocks if kind == "sh" and not text.startswith("pip install")]
    expected = [line for kind, text in blocks if kind == "text" for line in text.splitlines()]
    assert commands
    assert expected
    copy = tmp_path / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.db"))
    ports = {}
    for path in copy.rglob("*"):
        if path.suffix in (".py", ".yaml"):
            path.write_text(PORTS.sub(lambda found: port_for(ports, found), path.read_text(encoding="utf-8")))
    script = PORTS.sub(lambda found: port_for(ports, found), PREAMBLE + "\n".join(commands))
    folder = tmp_path if "python -m examples" in script else copy / name
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "RATE_LIMIT_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(
        [bash, "-c", script],
        cwd=folder,
        env={**environment, "NO_PROXY": "*", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        shown, _ = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, shown
    for line in expected:
        pattern = re.escape(PORTS.sub(lambda found: port_for(ports, found), line)).replace("…", ".*")
        assert re.search(pattern, shown), f"{line!r} is not in\n{shown}"


def port_for(ports, found):
    """Return the free port that stands for a port of the README."""
    if found[0] not in ports:
        ports[found[0]] = str(free_port())
    return ports[found[0]]


def test_every_user_has_an_example_with_a_readme():
    folders = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    assert {"api", "llm", "outbound", "budget", "swarm", "service", "egress", "demo"} == folders
