"""Choose limits before you enforce them: replay logs, compare rules, suggest limits, simulate traffic.

Everything is decided by the code that enforces limits, in virtual time. The functions return plain data:

    from tidegate.plan import replay, read_spec
    report = replay(["access.log"], read_spec(["config.yaml"]))
    report["totals"]["denied_clients"]
"""

from tidegate.plan.api import ReplayOptions, replay
from tidegate.plan.rules.load import read_spec

__all__ = ["ReplayOptions", "read_spec", "replay"]
