"""Created files are accessible to their owner only, whatever the umask is; existing files keep their mode."""

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tidegate._runtime import files
from tidegate._runtime.files import make_private_file, make_private_folder, open_private, replace_private

PROGRAM = """
import asyncio, json, os, sys
from pathlib import Path

umask, place = int(sys.argv[1], 8), Path(sys.argv[2])
os.umask(umask)

import httpx
from tidegate import Limiter
from tidegate.budget import TaskBudget
from tidegate.budget._settings.environment import read_environment
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.sources import SourceRunner, read_source
from tidegate.outbound.sources._control import ControlServer, send_command


def modes():
    return {str(path.relative_to(place)): path.stat().st_mode & 0o7777 for path in sorted(place.rglob("*"))}


async def main():
    providers = Providers.of({"domain": "a.test", "limit": 100, "period": "1m"})
    sources = [
        read_source({"name": "one", "url": "https://a.test/", "interval": "1h", "to": {"files": "deep/er"}}),
        read_source({"name": "two", "url": "https://a.test/", "interval": "1h", "to": {"sqlite": "in/bodies.db"}}),
    ]
    answering = httpx.MockTransport(lambda _request: httpx.Response(200, text="x"))
    service = SourceRunner(providers, sources, data=place / "new" / "data", transport=answering)
    async with service, ControlServer(service):
        await service.start_due()
        await asyncio.gather(*service.tasks)
        text = "name: three\\nurl: https://a.test/\\ninterval: 1h\\n"
        await asyncio.to_thread(send_command, service.data, verb="add", text=text)
        print(json.dumps(modes()))


limiter = Limiter("5/1m", store=f"sqlite:///{place}/limits.db")
limiter.try_acquire("a")
settings = read_environment({"RATE_LIMIT_ENABLED": "true", "RATE_LIMIT_PER_DAY": "5",
                             "RATE_LIMIT_STORAGE_PATH": str(place / "budget" / "deep" / "tasks.db")})
budget = TaskBudget(settings)
batch = budget.check_all_limits(1)
asyncio.run(main())
limiter.close()
budget.close()
"""


def run_program(tmp_path, umask):
    """Do everything that creates files, and return their modes while it runs."""
    words = [sys.executable, "-c", PROGRAM, umask, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.once
@pytest.mark.parametrize("umask", ["000", "022", "777"])
def test_created_files_are_accessible_only_to_their_owner(tmp_path, umask):
    if umask == "777" and os.geteuid() != 0:
        pytest.skip("only root can use files that nobody may read")  # what SQLite and tempfile create meanwhile
    modes = run_program(tmp_path, umask)
    folders = {name for name in modes if (tmp_path / name).is_dir()}
    assert {name: oct(mode) for name, mode in modes.items()} == {
        name: oct(0o700 if name in folders else 0o600) for name in modes
    }
    names = " ".join(modes)
    for expected in (
        *("limits.db", "limits.db-wal", "limits.db-shm", "budget/deep/tasks.db-wal"),
        *("new/data/quota.db-wal", "new/data/sources.db-wal", "new/data/control.json", "new/data/sources/three.yaml"),
        *("new/data/deep/er/one/", "new/data/in/bodies.db"),
    ):
        assert expected in names, expected


def test_existing_files_keep_their_mode(tmp_path):
    """They may be shared on purpose; SQLite's files beside a database are shared with it."""
    (tmp_path / "budget").mkdir()
    (tmp_path / "budget").chmod(0o775)
    (tmp_path / "budget" / "deep").mkdir()
    (tmp_path / "budget" / "deep").chmod(0o775)
    for name in ("limits.db", "budget/deep/tasks.db"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o664)
    modes = run_program(tmp_path, "077")
    assert modes["budget"] == modes["budget/deep"] == 0o775
    shared = {name: mode for name, mode in modes.items() if "limits.db" in name or "tasks.db" in name}
    assert len(shared) == 6
    assert set(shared.values()) == {0o664}


def test_functions_create_exactly_these_modes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_private_folder("a/b/c")
    assert [stat.S_IMODE(Path(name).stat().st_mode) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    make_private_folder("a/b/c")
    make_private_file("a/file")
    Path("a/file").write_text("kept")
    Path("a/file").chmod(0o640)
    make_private_file("a/file")
    assert (Path("a/file").read_text(), stat.S_IMODE(Path("a/file").stat().st_mode)) == ("kept", 0o640)
    with pytest.raises(FileExistsError):
        make_private_folder("a/file")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        make_private_folder("a/file/below")
    with pytest.raises(FileExistsError):
        open_private("a/file", os.O_WRONLY | os.O_EXCL)
    replace_private("a/file", "new")
    assert (Path("a/file").read_text(), stat.S_IMODE(Path("a/file").stat().st_mode)) == ("new", 0o600)
    assert sorted(path.name for path in Path("a").iterdir()) == ["b", "file"]


def test_no_module_creates_files_in_another_way():
    """Modules open files for writing and create folders only through `tidegate._runtime.files`."""
    creating = {"mkdir", "makedirs", "touch", "write_text", "write_bytes", "mkfifo"}
    for path in Path(tidegate.__file__).parent.rglob("*.py"):
        if path == Path(files.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in creating, f"{path}:{node.lineno}"
