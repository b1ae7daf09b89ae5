"""Choose limits before you enforce them: replay logs, compare rules, suggest limits, simulate traffic.

Everything is decided by the code that enforces limits, in virtual time. The functions return plain data:

    from tidegate.plan import replay, read_spec
    report = replay(["access.log"], read_spec(["config.yaml"]))
    report["totals"]["denied_clients"]
"""

from tidegate.plan._api import ReplayOptions, diff, replay, suggest
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._report import ClientNames, Report
from tidegate.plan._rules.load import RulesSpec, read_spec
from tidegate.plan._simulate import SimulateOptions, compare_algorithms, simulate
from tidegate.plan._suggest import SuggestOptions, to_yaml

__all__ = [
    "ClientNames",
    "LogOptions",
    "ReplayOptions",
    "Report",
    "RulesSpec",
    "SimulateOptions",
    "SuggestOptions",
    "compare_algorithms",
    "diff",
    "read_spec",
    "replay",
    "simulate",
    "suggest",
    "to_yaml",
]
