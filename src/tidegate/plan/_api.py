"""The functions of the package: they read files, and return plain data."""

from __future__ import annotations

import logging
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.plan._diff import Comparison
from tidegate.plan._logs.files import STANDARD_INPUT, size_of
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._logs.stream import LogStream
from tidegate.plan._quotas import CallMeasurement, describe_quotas
from tidegate.plan._replay import Replay, Replays
from tidegate.plan._report import ClientNames, describe_log, describe_range, describe_replay, show_time
from tidegate.plan._rules.load import SHARED_KINDS, RulesSpec, open_providers, open_rules
from tidegate.plan._suggest import Measurement, SuggestOptions, describe_group, suggest_limits, to_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import tzinfo
    from pathlib import Path

    from tidegate.plan._logs.stream import LogSummary
    from tidegate.plan._replay import ReplayResult
    from tidegate.plan._report import Report


ANY_LIMIT: Final = {"all": ("1/1s",)}  # of rules that only name clients and endpoints
MIN_PARALLEL_BYTES: Final = 32 * 2**20  # starting processes takes longer than deciding about less
MAX_ATTEMPTS: Final = 8
COARSE: Final = SECOND // 100  # a log with a coarser resolution gets a range
log: logging.Logger = logging.getLogger("tidegate")


def no_progress(_done: int, _total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class ReplayOptions:
    """How to read logs and to report: see `tidegate plan replay --help`."""

    logs: LogOptions = field(default_factory=LogOptions)
    processes: int = 1  # that decide, each about a share of the clients; more than one for large logs
    progress: Callable[[int, int], None] = no_progress
    names: ClientNames = field(default_factory=ClientNames)
    zone: tzinfo = UTC
    retries: int = 0
    uncertainty: int | None = None  # of times, in microseconds; None: the resolution of the log


def open_logs(paths: Iterable[str | Path], options: ReplayOptions) -> LogStream:
    """Open logs."""
    return LogStream(paths, options.logs, progress=options.progress)


@contextmanager
def without_logs() -> Iterator[None]:
    """Log nothing: a replay denies what was decided long ago."""
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def replay(paths: Iterable[str | Path], rules: RulesSpec, options: ReplayOptions | None = None) -> Report:
    """Replay logs against rules, and return the report.

    With several processes, each of them reads the logs and decides about its share of the clients.
    """
    options, paths = options or ReplayOptions(), list(paths)
    shards = options.processes if is_large(paths) and rules.kind not in SHARED_KINDS else 1
    with ProcessPoolExecutor(shards - 1, get_context("spawn")) if shards > 1 else nullcontext() as pool:
        quiet = replace(options, progress=no_progress)
        others = (
            [pool.submit(replay_shard, paths, rules, quiet, shard, shards) for shard in range(1, shards)]
            if pool
            else []
        )
        results, log, uncertainty = replay_shard(paths, rules, options, 0, shards)
        for other in others:
            pairs = zip(results, other.result()[0], strict=True)
            results = [mine.merge(theirs) for mine, theirs in pairs]
    report = describe_replay(results[0], log, options.names, options.zone)
    report["range"] = None
    if len(results) > 1:
        found, low, high = (each.tally.denied for each in results)
        report["range"] = describe_range(low, high, found, uncertainty)
    return report


def is_large(paths: list[str | Path]) -> bool:
    """Return whether logs are worth several processes; standard input cannot be read by several."""
    return STANDARD_INPUT not in map(str, paths) and sum(size_of(str(path)) for path in paths) >= MIN_PARALLEL_BYTES


def replay_shard(
    paths: list[str | Path], rules: RulesSpec, options: ReplayOptions, shard: int, shards: int
) -> tuple[list[ReplayResult], LogSummary, int]:
    """Replay the requests of a share of the clients: as they are, and as coarse times allow at least and at most."""
    stream = open_logs(paths, options)
    with without_logs():
        look = stream.look()
        uncertainty = look.resolution if options.uncertainty is None else options.uncertainty
        shifts = [0, -uncertainty, uncertainty] if uncertainty > COARSE and rules.kind not in SHARED_KINDS else [0]
        replays = [
            Replay(
                open_rules(rules, has_durations=look.has_durations, shift=shift), retries=options.retries, place=place
            )
            for place, shift in enumerate(shifts)
        ]
        Replays(replays, shard, shards).run(stream)
    return [each.result for each in replays], stream.summary, uncertainty


def diff(paths: Iterable[str | Path], old: RulesSpec, new: RulesSpec, options: ReplayOptions | None = None) -> Report:
    """Replay logs against old and new rules, and return the decisions that differ."""
    options = options or ReplayOptions()
    stream = open_logs(paths, options)
    with without_logs():
        durations = stream.look().has_durations
        replays = [
            Replay(open_rules(each, has_durations=durations), place=place) for place, each in enumerate((old, new))
        ]
        comparison = Comparison(*replays)
        comparison.run(stream)
    return comparison.describe(stream.summary, options.names, options.zone)


def suggest(
    paths: Iterable[str | Path],
    wanted: SuggestOptions | None = None,
    rules: RulesSpec | None = None,
    options: ReplayOptions | None = None,
) -> Report:
    """Suggest limits for the categories of rules, or for the endpoints of logs, and replay them.

    With rules of kind provider: the smallest quotas with which no call would have waited too long.
    """
    wanted, options, paths = wanted or SuggestOptions(), options or ReplayOptions(), list(paths)
    if STANDARD_INPUT in map(str, paths):
        raise ConfigError(
            "cannot be read from standard input, because it is read several times: use a file", field="--log"
        )
    stream = open_logs(paths, options)
    if rules is not None and rules.kind == "provider":
        return suggest_for_providers(stream, wanted, rules, options)
    by_policy = rules is not None
    with without_logs():
        opened = open_rules(rules or RulesSpec("limits", limits=ANY_LIMIT))
        found = Measurement(opened, wanted, by_policy=by_policy)
        found.run(stream)
    if not found.chosen():
        raise ConfigError("the logs have no requests to suggest limits for", field="--log")
    trusted = () if rules is None else rules.trusted_proxies
    return fit_requests(paths, found, wanted, opened.patterns, trusted, options) | {
        "log": describe_log(stream.summary, options.names),
        "from": show_time(found.first, options.zone),
        "until": show_time(found.last, options.zone),
        "left_out": {"requests": found.left_out, "clients": len(wanted.left_out)},
    }


def suggest_for_providers(
    stream: LogStream, wanted: SuggestOptions, rules: RulesSpec, options: ReplayOptions
) -> Report:
    """Suggest quotas of providers."""
    with without_logs():
        found = CallMeasurement(open_providers(rules))
        found.run(stream)
    if not found.found:
        raise ConfigError("the logs have no calls to these providers", field="--log")
    return {
        "wait": wanted.wait / SECOND,
        "providers": [describe_quotas(each, wanted.wait) for each in found.found.values()],
        "log": describe_log(stream.summary, options.names),
        "from": show_time(found.first, options.zone),
        "until": show_time(found.last, options.zone),
    }


def fit_requests(
    paths: list[str | Path],
    found: Measurement,
    wanted: SuggestOptions,
    patterns: dict[str, list[str]],
    trusted: tuple[str, ...],
    options: ReplayOptions,
) -> dict[str, Any]:
    """Replay what is suggested, and raise it while more requests are denied than wanted."""
    skipped: dict[str, int] = {}
    for attempt in range(MAX_ATTEMPTS):
        suggested = suggest_limits(found, wanted, skipped)
        groups = [
            describe_group(group, suggested[group.name], wanted, patterns, options.names.show)
            for group in found.chosen()
        ]
        config = to_config(groups, suggested, wanted.algorithm) | {"exempt_clients": list(wanted.left_out)}
        replayed = replay(
            paths, RulesSpec("inbound", mapping=config, trusted_proxies=trusted), replace(options, uncertainty=0)
        )
        policies = {each["policy"]: each for each in replayed["policies"]}
        over = [
            group["group"]
            for group in groups
            if group["category"] in policies and policies[group["category"]]["denied_share"] > wanted.max_requests
        ]
        for name in over:
            skipped[name] = 2 * skipped.get(name, 0) + 1
        if not over or attempt == MAX_ATTEMPTS - 1:
            break
    totals = replayed["totals"]
    return {
        "algorithm": wanted.algorithm,
        "goal": {"max_clients": wanted.max_clients, "max_requests": wanted.max_requests, "missed": over},
        "groups": groups,
        "denied": {"requests": totals["denied"], "clients": totals["denied_clients"]},
        "totals": totals,
    }
