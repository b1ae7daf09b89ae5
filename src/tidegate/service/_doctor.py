"""Checks a deployment, and says how to fix the problems that it finds.

With the settings of a service, it checks what `tidegate start` would run. With only a store, a bus or trusted proxies,
it checks these, as an application with a middleware uses them.

The checks change nothing: they only peek at the store (which creates missing tables) and read files. Each check is a
function that takes the settings and yields findings; CHECKS lists them. Only `fix_store`
changes something.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tidegate._policy.durations import format_duration, format_exact_duration
from tidegate._runtime.clock import SystemClock
from tidegate._runtime.urls import redact
from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound._client.address import TrustedProxies
from tidegate.service._config.values import NO_TOKEN
from tidegate.service._decisions.decider import PROBE_POLICY
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from tidegate.service._config.settings import ListenAddress, Settings
    from tidegate.stores import Store

Level = Literal["ok", "note", "problem"]

SECRET_SETTINGS: Final = ("decision_token", "admin_token", "metrics_token", "reservation_secret")
STORE_PROBES: Final = 20  # calls to the store
SLOW_RESPONSE: Final = 5000  # microseconds; for slower stores a lease is recommended
MAX_CLOCK_SKEW: Final = SECOND  # between the clocks of the store and of this machine
BUS_TIMEOUT: Final = 3.0  # seconds to connect to a bus
MIN_FREE_BYTES: Final = 100 * 2**20
GROUP_AND_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
# extra: its packages
EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "service": ("httptools", "msgspec"),
    "envoy": ("grpcio", "protobuf"),
    "sources": ("httpx", "cronsim"),
    "redis": ("redis",),
    "postgres": ("psycopg",),
    "nats": ("nats-py",),
    "otel": ("opentelemetry-api",),
}
SHARED_SETTINGS: Final = frozenset(("store", "store_file", "bus", "bus_file"))  # which an application has, too
SCHEME_EXTRAS: Final = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("postgres", "postgresql"), "postgres"),
    **dict.fromkeys(("nats", "tls"), "nats"),
}


class Finding(NamedTuple):
    """One result of a check and, unless it is `ok`, how to fix it."""

    level: Level
    what: str
    to_do: str = ""


def ok(what: str) -> Finding:
    """Return a finding that something is correct."""
    return Finding("ok", what)


def note(what: str, to_do: str) -> Finding:
    """Return a finding that may be intended."""
    return Finding("note", what, to_do)


def problem(what: str, to_do: str) -> Finding:
    """Return a finding that needs to be fixed."""
    return Finding("problem", what, to_do)


def examine(
    settings: Settings, trusted: Sequence[str] = (), environment: Mapping[str, str] | None = None, *, fix: bool = False
) -> list[Finding]:
    """Run the checks for these settings; `trusted` are the `trusted_proxies` of an application.

    With `fix`, remove first from the store what only older versions of tidegate use.
    """
    fixed = list(fix_store(settings)) if fix else []
    service = is_service(settings, trusted)
    needed = {*needed_extras(settings), *(["service"] if service else [])}
    findings = [finding for check in (CHECKS if service else APPLICATION_CHECKS) for finding in check(settings)]
    return [
        *check_packages(needed),
        *fixed,
        *findings,
        *check_proxies(trusted, os.environ if environment is None else environment),
    ]


def is_service(settings: Settings, trusted: Sequence[str] = ()) -> bool:
    """Return whether the settings are those of a service; not if they only name what an application also uses."""
    shared = bool(trusted or settings.flags.keys() & SHARED_SETTINGS)
    others = settings.file is not None or settings.policies.entries or settings.flags.keys() - SHARED_SETTINGS
    return bool(others) or not shared


# ---- installed packages ----------------------------------------------------------------------------------------------


def check_packages(needed: Collection[str]) -> Iterator[Finding]:
    """Check that the packages of these groups are installed."""
    installed: list[str] = []
    for extra, packages in EXTRAS.items():
        for package in packages:
            try:
                installed.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                if extra in needed:
                    yield problem(f"{package} is not installed", f"pip install 'tidegate[{extra}]'")
    python = ".".join(map(str, sys.version_info[:3]))
    yield ok(f"tidegate {version('tidegate')} on Python {python}, with {', '.join(installed)}")


def needed_extras(settings: Settings) -> Iterator[str]:
    """Yield the extras that the settings need, in addition to that of a service."""
    if settings.grpc is not None:
        yield "envoy"
    for url in (settings.store, settings.bus, settings.swarm):
        scheme = (url or "").partition(":")[0].partition("+")[0]
        if scheme in SCHEME_EXTRAS:
            yield SCHEME_EXTRAS[scheme]
    if settings.runs_sources:
        yield "sources"
    if settings.telemetry:
        yield "otel"


# ---- the store and the bus -------------------------------------------------------------------------------------------


def check_store(settings: Settings) -> Iterator[Finding]:
    """Measure the response time of the store, and compare its clock with the clock of this machine."""
    name, clock = redact(settings.store), SystemClock()
    if settings.store.startswith("memory:"):
        yield note(
            "the store is in memory: usage is lost when the process ends",
            "set store: sqlite:///limits.db to keep usage, or redis:// or postgresql:// to share it",
        )
        return
    try:
        opened = OpenedStore.open(settings.store).store
    except RateLimitError as error:
        yield problem(f"the store {name} cannot be opened: {error}", "correct its URL, or install its extra")
        return
    try:
        durations, skews = [], []
        for _ in range(STORE_PROBES):
            started = clock.steady()
            decision = opened.apply("peek", ((PROBE_POLICY, "ready", (1,)),))[0]
            duration = clock.steady() - started
            if isinstance(decision, LocalDecision):
                yield problem(*explain_no_response(opened, name))
                return
            durations.append(duration)
            skews.append(decision.at - (clock.ns() // 1000 - duration // 2))
        yield from judge_store(name, median(durations), median(skews))
        yield from check_outdated(opened)
    finally:
        opened.close()


def check_outdated(opened: Store, *, drop: bool = False) -> Iterator[Finding]:
    """Report, or remove, what only older versions of tidegate use in a store."""
    try:
        found = opened.outdated(drop=drop)
    except RateLimitError as error:
        yield problem(str(error), "fix the cause, and run the command again")
        return
    for name, in_use in found.items():
        if drop:
            yield from () if in_use else (ok(f"dropped {name} of an older tidegate"),)
        elif in_use:
            what = f"processes of an older tidegate use {name} in the store"
            yield note(what, "upgrade them, then run tidegate doctor --fix")
        else:
            yield note(f"only an older tidegate uses {name} in the store", "drop it with tidegate doctor --fix")


def fix_store(settings: Settings) -> Iterator[Finding]:
    """Remove from the store what only older versions of tidegate use, unless a process of them is running."""
    try:
        opened = OpenedStore.open(settings.store).store
    except RateLimitError:
        return  # reported by `check_store`
    try:
        yield from check_outdated(opened, drop=True)
    finally:
        opened.close()


def explain_no_response(opened: Store, name: str) -> tuple[str, str]:
    """Return why a store did not respond, with the error of its driver, and how to fix it."""
    try:
        opened.ask_store("peek", ((PROBE_POLICY, "ready", (1,)),))  # not through the guard, which would hide the error
    except (RateLimitError, OSError) as error:
        return f"the store {name} does not respond: {error}", "fix the cause, or correct the URL of the store"
    return (
        f"the store {name} does not respond within its deadline",
        "start it, check its address, login and firewall, or extend the deadline: ?deadline=200ms",
    )


def judge_store(name: str, duration: float, skew: float) -> Iterator[Finding]:
    """Judge the response time (in microseconds) and the clock of a store."""
    measured = f"the store {name} responds within {format_duration(duration / SECOND)}"
    if duration > SLOW_RESPONSE:
        yield note(
            f"{measured}, which delays every decision", "use a store nearby, or take permits in advance: lease: true"
        )
    else:
        yield ok(measured)
    if abs(skew) > MAX_CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        yield problem(
            f"the clock of the store is {format_exact_duration(abs(skew) / SECOND)} {ahead} the clock of this machine",
            "synchronise both with NTP: limits use the clock of the store, logs and reservations that of this machine",
        )
    else:
        yield ok("the clocks of the store and of this machine agree")


def check_buses(settings: Settings) -> Iterator[Finding]:
    """Check that each bus can be reached."""
    from tidegate.bus import open_bus  # noqa: PLC0415 - most deployments have no bus

    for url in dict.fromkeys(url for url in (settings.bus, settings.swarm) if url):
        try:
            with open_bus(url) as bus:
                if bus.wait(BUS_TIMEOUT):
                    yield ok(f"the bus {redact(url)} responds")
                else:
                    yield problem(
                        f"the bus {redact(url)} does not respond", "start it, check its address, login and firewall"
                    )
        except RateLimitError as error:
            yield problem(f"the bus {redact(url)} cannot be opened: {error}", "correct its URL, or install its extra")


# ---- files -----------------------------------------------------------------------------------------------------------


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check that other users can neither read secrets nor change files of the service."""
    count = 0
    for path, secret in files_of(settings):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            yield problem(f"{path} cannot be checked: {error.strerror}", "correct the path, or the owner of the file")
            continue
        count += 1
        if mode & WRITABLE_BY_OTHERS:
            yield problem(f"other users can change {path} ({stat.filemode(mode)})", f"chmod go-w {path}")
        if secret and mode & GROUP_AND_OTHERS & ~WRITABLE_BY_OTHERS:
            mask = "700" if stat.S_ISDIR(mode) else "600"
            yield problem(
                f"other users can read {path}, which contains secrets ({stat.filemode(mode)})", f"chmod {mask} {path}"
            )
    if count:
        yield ok(f"checked the permissions of {count} files and directories")


def files_of(settings: Settings) -> Iterator[tuple[Path, bool]]:
    """Yield every file of the settings, and whether it contains secrets."""
    if settings.file is not None:
        text = settings.file.read_text(encoding="utf-8")
        yield settings.file, any(f"{name}:" in text for name in SECRET_SETTINGS)
    yield from ((path, True) for path in settings.secrets)
    for path in (*settings.providers, *yaml_files(settings.provider_dirs)):
        yield path, has_field(path, "api_key")
    for path in (*settings.sources, *yaml_files(settings.source_dirs)):
        yield path, has_field(path, "headers")
    if settings.runs_sources and settings.data_folder.exists():
        yield settings.data_folder, True
    if settings.store.startswith("sqlite:///"):
        path = Path(settings.store.removeprefix("sqlite:///").partition("?")[0])
        if path.exists():
            yield path, False


def yaml_files(folders: Sequence[Path]) -> list[Path]:
    """Return the YAML files in these directories."""
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.y*ml"))]


def has_field(path: Path, field: str) -> bool:
    """Return whether a file seems to have a field with this name."""
    try:
        return f"{field}:" in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def check_disk_space(settings: Settings) -> Iterator[Finding]:
    """Check that the data directory is writable and has free space."""
    if not settings.runs_sources:
        return
    folder = next(
        (path for path in (settings.data_folder, *settings.data_folder.absolute().parents) if path.exists()), Path()
    )
    if not os.access(folder, os.W_OK):
        yield problem(
            f"{folder} cannot be written to", "set data to another directory, or change the owner of this one"
        )
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        yield problem(
            f"only {free // 2**20} MB are free for {settings.data_folder}",
            "free disk space, or set data to another directory",
        )


# ---- the network -----------------------------------------------------------------------------------------------------


def check_addresses(settings: Settings) -> Iterator[Finding]:
    """Check who can reach the service, and with which permissions."""
    for name in ("listen", "grpc", "resp"):
        address: ListenAddress | None = getattr(settings, name)
        if address is None:
            continue
        if address.loopback:
            yield ok(f"{name} {address}: only this machine can connect")
        elif name == "grpc" or settings.decision_token is None:
            reason = "Envoy sends no token" if name == "grpc" else "no token is set"
            yield note(
                f"{name} {address}: every client that can connect can request decisions, because {reason}",
                "restrict access with a firewall"
                if name == "grpc"
                else "set decision_token_file and admin_token_file, or restrict access with a firewall",
            )
        elif name != "resp" or settings.resp_tls_cert is None:
            yield note(
                f"{name} {address}: tokens are sent unencrypted",
                "put a proxy with TLS in front, or use a private network"
                if name == "listen"
                else "set resp_tls_cert and resp_tls_key, or use a private network",
            )
        yield from check_address_in_use(name, address)
    if settings.metrics_token == NO_TOKEN and settings.decision_token is not None and not settings.listen.loopback:
        yield note("every client that can connect can read /metrics", "set metrics_token_file")
    if settings.decision_token is not None and settings.admin_token is None:
        yield note("no admin token is set: reset and block are refused", "set admin_token_file")
    if settings.admin_token is not None and settings.decision_token is None and not settings.listen.loopback:
        yield note("an admin token is set, but decisions need no token", "set decision_token_file")


def check_address_in_use(name: str, address: ListenAddress) -> Iterator[Finding]:
    """Check whether a program listens already. It may be this service."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(tuple(address))
    except OSError as error:
        yield note(
            f"{name}: cannot listen on {address}: {error.strerror or error}",
            "ignore this if the service is running; otherwise choose another address or stop the other program",
        )


def check_policies(settings: Settings) -> Iterator[Finding]:
    """Check that there are policies, and what they do while the store is unavailable."""
    entries, domains = settings.policies.entries, settings.policies.domains
    if not entries and not domains and not settings.runs_sources:
        yield problem("no policy is configured", "add policies to the file, or use --policy api=100/1m")
        return
    yield ok(f"policies: {len(entries)}, domains: {len(domains)}")
    unlimited = sorted(name for name, entry in entries.items() if entry.policy.on_store_error == "allow")
    if unlimited and not settings.store.startswith("memory:"):
        yield note(
            f"while the store is unavailable, these policies allow every call: {', '.join(unlimited[:5])}",
            "ignore this if it is intended; otherwise set on_store_error: local or deny",
        )


def check_proxies(trusted: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that only proxies are trusted to name the address of a client."""
    if environment.get("FORWARDED_ALLOW_IPS", "").strip() == "*":
        yield problem(
            "FORWARDED_ALLOW_IPS is *: every client can choose its address",
            "set it to the addresses of your proxies",
        )
    if not trusted:
        return
    everyone = [network for network in trusted if network.strip() in ("*", "0.0.0.0/0", "::/0")]
    if everyone:
        yield problem(
            f"trusted proxies {everyone[0]}: every client can choose its address, and so its limits",
            "list only the addresses or networks of your proxies",
        )
        return
    try:
        TrustedProxies(trusted)
    except ConfigError as error:
        yield problem(str(error), "use addresses such as 10.0.0.1 or networks such as 10.0.0.0/8")
    else:
        yield ok(f"trusted proxies: {', '.join(trusted)}")


def check_budget(settings: Settings) -> Iterator[Finding]:
    """Check the settings of the task budget that the service reports, and the path of its storage."""
    if not settings.budget:
        return
    from tidegate.budget._storage.settlements import check_storage, find_path  # noqa: PLC0415 - most services show no budget
    from tidegate.service._runtime.components import read_budget_settings, shown_budget  # noqa: PLC0415 - as above

    try:
        budget = shown_budget(read_budget_settings(settings.budget if isinstance(settings.budget, Path) else None))
        check_storage(budget)
    except ConfigError as error:
        yield problem(f"the budget cannot be opened: {error}", "correct the RATE_LIMIT_* variables, or the budget file")
        return
    path = find_path(budget.store)
    if path is not None and not path.exists():
        yield note(
            f"the database of the budget does not exist yet: {path}",
            "start a program that uses the budget: it creates the file; the service only reads it",
        )
    else:
        yield ok(f"the store of the budget is {redact(str(budget.store))}")


CHECKS: Final[tuple[Callable[[Settings], Iterator[Finding]], ...]] = (
    check_policies,
    check_store,
    check_buses,
    check_addresses,
    check_files,
    check_disk_space,
    check_budget,
)
APPLICATION_CHECKS: Final = (check_store, check_buses)
