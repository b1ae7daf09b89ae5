"""Importing tidegate loads no optional package."""

import subprocess
import sys

# Run in a new process, because the test runner has imported many packages.
LIST = """
import sys
before = set(sys.modules)
import tidegate
names = {name.partition(".")[0] for name in set(sys.modules) - before}
names -= sys.stdlib_module_names | {"tidegate"}
print(*(name for name in names if not name.startswith("_sysconfigdata")))  # the library's own
"""


def test_import_loads_no_optional_package():
    command = [sys.executable, "-c", LIST]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert set(names) <= {"yaml", "_yaml", "http_sf", "typing_extensions"}
