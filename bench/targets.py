"""The targets of the project, checked against the figures of one run."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from bench.libraries import OURS
from bench.threads import MISTAKES

HOT_TIMES: Final = 5
MANY_TIMES: Final = 5
BYTES: Final = 200
THREADS_TIMES: Final = 3
THREADS_RATE: Final = 1_000_000


class TargetResult(NamedTuple):
    """Whether a target is met, and by what figure."""

    target: str
    met: bool
    figure: str


def judge(results: dict[str, Any]) -> list[TargetResult]:
    """Judge what was measured."""
    found: list[TargetResult] = []
    if "hot_key" in results:
        ratio, peer = times_faster(results["hot_key"]["hot-allowed"])
        found.append(
            compare_ratio(
                f"hot key: at least {HOT_TIMES} times as fast as the fastest other library", ratio, HOT_TIMES, peer
            )
        )
    if "many_keys" in results:
        ratio, peer = times_faster(results["many_keys"]["many-known"])
        found.append(
            compare_ratio(
                f"100,000 keys: at least {MANY_TIMES} times as fast as the fastest other library",
                ratio,
                MANY_TIMES,
                peer,
            )
        )
    if "five_limits" in results and "hot_key" in results:
        ours = results["five_limits"]["five"]["ns"][OURS].best
        peer, theirs = fastest(results["hot_key"]["hot-allowed"])
        found.append(
            compare_ratio("5 limits: faster than one limit of the fastest other library", theirs / ours, 1, peer)
        )
    for case in results.get("memory", {}).values():
        size, keys = case["bytes"][OURS]["bytes"], int(case["bytes"][OURS]["keys"])
        found.append(
            TargetResult(f"at most {BYTES} {case['title']}", size <= BYTES, f"{size:.0f} bytes at {keys:,} keys")
        )
    if "threads" in results:
        found += judge_threads(results["threads"])
    return found


def judge_threads(results: dict[str, Any]) -> list[TargetResult]:
    """Judge rates against the best peer that made no mistake in any round."""
    fast = results["threads-fast"]["runs"]
    mistakes = {name: sum(case["runs"][name][kind] for case in results.values() for kind in MISTAKES) for name in fast}
    found = [TargetResult("8 threads: exactly the limit admitted", mistakes[OURS] == 0, f"{mistakes[OURS]} errors")]
    right = {name: run["best"] for name, run in fast.items() if name != OURS and not mistakes[name]}
    rate = fast[OURS]["best"]
    if right:
        peer = max(right, key=lambda name: right[name])
        found.append(
            compare_ratio(
                f"8 threads: at least {THREADS_TIMES} times as fast as the fastest other library without errors",
                rate / right[peer],
                THREADS_TIMES,
                peer,
            )
        )
    found.append(
        TargetResult(f"8 threads: {THREADS_RATE:,} decisions a second", rate >= THREADS_RATE, f"{rate:,.0f}/s")
    )
    return found


def fastest(case: dict[str, Any]) -> tuple[str, float]:
    """Find the fastest peer of a timed case, and its nanoseconds."""
    peers = {name: timing.best for name, timing in case["ns"].items() if name != OURS}
    peer = min(peers, key=lambda name: peers[name])
    return peer, peers[peer]


def times_faster(case: dict[str, Any]) -> tuple[float, str]:
    """Tell how many times faster we are than the fastest peer, and which that is."""
    peer, theirs = fastest(case)
    return theirs / case["ns"][OURS].best, peer


def compare_ratio(target: str, ratio: float, wanted: float, peer: str) -> TargetResult:
    """Judge a ratio."""
    return TargetResult(target, ratio >= wanted, f"{ratio:.1f} times {peer.replace('_', '-')}")
