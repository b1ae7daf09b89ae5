"""Importing tidegate is cheap: it loads no optional package, and no module of the library that is slow to import."""

import importlib
import subprocess
import sys

import pytest

import tidegate
from tests.cases import cases

# Run in a new process, because the test runner has imported many packages.
LIST = """
import sys
before = set(sys.modules)
{statement}
print(*(set(sys.modules) - before))
"""
# Modules that take as long to import as the rest of the engine, and that only some limiters need.
SLOW = {
    "calendar",
    "difflib",
    "email",
    "hashlib",
    "importlib.metadata",
    "secrets",
    "sqlite3",
    "ssl",
    "yaml",
    "zoneinfo",
}


def modules_after(statement):
    command = [sys.executable, "-c", LIST.format(statement=statement)]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def packages(modules):
    found = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"tidegate"}
    return {name for name in found if not name.startswith("_sysconfigdata")}  # the library's own


def test_import_of_the_package_loads_none_of_its_modules():
    modules = modules_after("import tidegate")
    assert {name for name in modules if name.startswith("tidegate")} == {"tidegate"}
    assert packages(modules) == set()
    assert not modules & {*SLOW, "asyncio", "dataclasses", "inspect", "logging"}


@pytest.mark.parametrize("name", ["Limiter", "AsyncLimiter", "Limit", "Policy", "Denied"])
def test_import_of_a_name_loads_only_what_it_needs(name):
    modules = modules_after(f"from tidegate import {name}")
    assert packages(modules) == set()
    assert not modules & (SLOW - {"ssl"}), "asyncio imports ssl"
    faces = {"adaptive", "budget", "bus", "headers", "inbound", "outbound", "service", "swarm", "testing"}
    assert not {f"tidegate.{face}" for face in faces} & modules


def test_a_limiter_in_memory_loads_no_other_store():
    modules = modules_after("from tidegate import Limiter; Limiter('5/1m').try_acquire('key')")
    assert packages(modules) == set()
    assert not modules & (SLOW - {"ssl"})


def test_only_the_service_and_its_clients_need_msgspec():
    engine = (
        "from tidegate import AsyncLimiter, Limiter, Policy, RateLimitError; import tidegate.inbound, tidegate.service"
    )
    assert "msgspec" not in modules_after(engine)
    assert "msgspec" in modules_after("import tidegate.service.client")


WITHOUT = "import sys; sys.modules[{package!r}] = None; {statement}"  # its import fails, as if it were not installed


@pytest.mark.parametrize("package", ["msgspec", "httpx"])
def test_a_client_without_its_extra_says_what_to_install(package):
    def run(statement):
        command = [sys.executable, "-c", WITHOUT.format(package=package, statement=statement)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    done = run("import tidegate.service.client")
    assert done.stderr.splitlines()[-1].startswith("tidegate.errors.ConfigError: ")
    assert "pip install 'tidegate[client]'" in done.stderr.splitlines()[-1]
    done = run("from tidegate._cli import main; sys.exit(main(['peek', 'api', 'k']))")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"{package}: pip install 'tidegate[client]'" in done.stderr


def test_a_calendar_window_loads_the_calendar():
    limit = "from tidegate import Limit; Limit(5, 'month', algorithm='calendar_window', timezone='Europe/Berlin')"
    assert "zoneinfo" in modules_after(limit)


@cases("name", tidegate.__all__)
def test_each_public_name_is_the_one_of_its_module(name):
    value = getattr(tidegate, name)
    assert name in dir(tidegate)
    home = getattr(value, "__module__", "")
    if home.startswith("tidegate."):
        assert getattr(importlib.import_module(home), name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tidegate' has no attribute 'Limitter'"):
        tidegate.Limitter  # noqa: B018 - reading it raises


def test_star_import_has_all_names():
    names = {}
    exec("from tidegate import *", names)  # noqa: S102 - a star import is not allowed in a function
    assert set(tidegate.__all__) <= set(names)
