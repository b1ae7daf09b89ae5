"""Importing tidegate is cheap: what is heavy is loaded by the adapter that needs it, when it is needed."""

import subprocess
import sys

# Run apart, since the test runner has itself imported half the world.
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
