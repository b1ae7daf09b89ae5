"""One mechanism for each thing in the package."""

import re
from pathlib import Path

from tests.cases import cases

SOURCES = Path(__file__).parents[2] / "src/tidegate"


def modules_with(pattern):
    found = re.compile(pattern)
    paths = SOURCES.rglob("*.py")
    return sorted(str(path.relative_to(SOURCES)) for path in paths if found.search(path.read_text(encoding="utf-8")))


MECHANISMS = {
    "a watched file": (r"st_mtime", ["_runtime/file_watcher.py"]),
    # The kit of buses publishes from several threads.
    "a background thread": (r"\bThread\(|_thread\.start_new", ["_runtime/background_thread.py", "testing/_bus_kit.py"]),
    "a histogram": (r"_bucket\", \{", ["observe/_histogram.py"]),
    "a variable in a file": (r"\\\$\\\{\(", ["_policy/setting_values.py"]),
    "a unit of money": (r"[\"']_micros[\"']", ["_policy/units.py"]),
    "the declaration of a setting": (r"def setting\(", ["_policy/declared_settings.py"]),
    "a signed webhook": (r"X-Tidegate-Signature\"\]", ["spending/_webhook.py"]),
    # Calls that tasks or gRPC make in a thread of their own.
    "a thread for calls": (
        r"ThreadPoolExecutor\(",
        [
            "outbound/sources/_ledger.py",
            "service/_envoy/service.py",
            "stores/_sqlite/async_worker.py",
            "testing/_store_guarantees.py",
            "testing/_store_kit.py",
            "testing/_value_guarantees.py",
        ],
    ),
}


@cases("name", list(MECHANISMS))
def test_there_is_one(name):
    pattern, modules = MECHANISMS[name]
    assert modules_with(pattern) == modules, f"{name}: use the mechanism that exists"
