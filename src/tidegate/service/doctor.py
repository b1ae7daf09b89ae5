"""Looks at a deployment as `tidegate start` would run it, and says of each thing whether it is well and what to do.

Nothing is changed: the store is only peeked at (a SQLite file is made if there is none), files are only looked at. Each
examination is a function of the settings that gives findings; EXAMINATIONS is the list.
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

from tidegate.clock import SystemClock
from tidegate.core.bounds import SECOND
from tidegate.core.decision import LocalDecision
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound.client.address import TrustedProxies
from tidegate.service.decisions.decider import PROBE_POLICY
from tidegate.stores.outage import GuardedStore, open_guarded
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tidegate.service.config.settings import ListenAddress, Settings
    from tidegate.stores import Store

Level = Literal["well", "note", "wrong"]

STORE_PROBES: Final = 20  # times that the store is asked
SLOW_ANSWER: Final = 5000  # microseconds for an answer from which on a lease is advised
MAX_CLOCK_SKEW: Final = SECOND  # between clocks
BUS_TIMEOUT: Final = 3.0  # seconds for a bus
MIN_FREE_BYTES: Final = 100 * 2**20  # bytes free
GROUP_AND_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
# extra: the packages it stands for
EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "service": ("uvicorn", "httptools", "grpcio", "protobuf"),
    "sources": ("httpx", "cronsim"),
    "redis": ("redis",),
    "postgres": ("psycopg",),
    "nats": ("nats-py",),
    "otel": ("opentelemetry-api",),
}
SCHEMES: Final = {"redis": "redis", "rediss": "redis", "valkey": "redis", "valkeys": "redis", "postgres": "postgres",
                  "postgresql": "postgres", "nats": "nats", "tls": "nats"}  # fmt: skip


class Finding(NamedTuple):
    """What was found, and, where that is not well, what to do."""

    level: Level
    what: str
    to_do: str = ""


def well(what: str) -> Finding:
    """Find that something is as it should be."""
    return Finding("well", what)


def note(what: str, to_do: str) -> Finding:
    """Find something that may be meant, or may not."""
    return Finding("note", what, to_do)


def wrong(what: str, to_do: str) -> Finding:
    """Find something that has to be put right."""
    return Finding("wrong", what, to_do)


def examine(
    settings: Settings, trusted: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[Finding]:
    """Examine everything; `trusted` is what an application takes for its proxies."""
    found = [finding for look in CHECKS for finding in look(settings)]
    return [*found, *proxies(trusted, os.environ if environment is None else environment)]


# ---- what is installed -----------------------------------------------------------------------------------------------


def versions(settings: Settings) -> Iterator[Finding]:
    """Look whether what the settings need is installed."""
    needed = {"service", *needed_extras(settings)}
    here: list[str] = []
    for extra, packages in EXTRAS.items():
        for package in packages:
            try:
                here.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                if extra in needed:
                    yield wrong(f"{package} is not installed", f"pip install 'tidegate[{extra}]'")
    python = ".".join(map(str, sys.version_info[:3]))
    yield well(f"tidegate {version('tidegate')} on Python {python}, with {', '.join(here)}")


def needed_extras(settings: Settings) -> Iterator[str]:
    """Name what the settings need beyond the service itself."""
    for url in (settings.store, settings.bus, settings.swarm):
        scheme = (url or "").partition(":")[0].partition("+")[0]
        if scheme in SCHEMES:
            yield SCHEMES[scheme]
    if settings.runs_sources:
        yield "sources"
    if settings.telemetry:
        yield "otel"


# ---- the store and the bus -------------------------------------------------------------------------------------------


def store(settings: Settings) -> Iterator[Finding]:
    """Ask the store, tell how fast it answers, and compare its clock with this machine's."""
    name, clock = redact(settings.store), SystemClock()
    if settings.store.startswith("memory:"):
        yield note(
            "the store is memory: what was counted is forgotten with the process",
            "set store: sqlite:///limits.db to keep it, redis:// or postgresql:// to share it",
        )
        return
    try:
        opened = open_guarded(settings.store)
    except RateLimitError as error:
        yield wrong(f"the store {name} cannot be opened: {error}", "correct its URL, or install its extra")
        return
    try:
        times, skews = [], []
        for _ in range(STORE_PROBES):
            began = clock.steady()
            decision = opened.apply("peek", ((PROBE_POLICY, "ready", (1,)),))[0]
            took = clock.steady() - began
            if isinstance(decision, LocalDecision):
                yield wrong(*unanswered(opened, name))
                return
            times.append(took)
            skews.append(decision.at - (clock.ns() // 1000 - took // 2))
        yield from answered(name, median(times), median(skews))
    finally:
        opened.close()


def unanswered(opened: Store, name: str) -> tuple[str, str]:
    """Say why a store did not answer, by its own word, and what to do."""
    try:
        if isinstance(opened, GuardedStore):
            opened.ask_store("peek", ((PROBE_POLICY, "ready", (1,)),))  # the guard itself only decides without it
    except (RateLimitError, OSError) as error:
        return f"the store {name} does not answer: {error}", "put that right, or correct its URL"
    return (
        f"the store {name} does not answer in time",
        "start it, check address, login and firewall, or allow it longer: ?deadline=200ms",
    )


def answered(name: str, took: float, skew: float) -> Iterator[Finding]:
    """Judge how fast a store answered, and its clock."""
    said = f"the store {name} answers within {took / 1000:.2f} ms"
    if took > SLOW_ANSWER:
        yield note(f"{said}, which every decision waits for", "bring it nearer, or take permits ahead: lease: true")
    else:
        yield well(said)
    if abs(skew) > MAX_CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        yield wrong(
            f"the clock of the store is {abs(skew) / SECOND:.1f} s {ahead} this machine's",
            "set both by NTP: limits go by the store's clock, logs and reservations by this machine's",
        )
    else:
        yield well("the clocks of store and machine agree")


def buses(settings: Settings) -> Iterator[Finding]:
    """Look whether each bus can be reached."""
    from tidegate.bus import open_bus  # noqa: PLC0415 - needed only where there is one

    for url in dict.fromkeys(url for url in (settings.bus, settings.swarm) if url):
        try:
            with open_bus(url) as bus:
                if bus.wait(BUS_TIMEOUT):
                    yield well(f"the bus {redact(url)} answers")
                else:
                    yield wrong(f"the bus {redact(url)} does not answer", "start it, check address, login and firewall")
        except RateLimitError as error:
            yield wrong(f"the bus {redact(url)} cannot be opened: {error}", "correct its URL, or install its extra")


# ---- files -----------------------------------------------------------------------------------------------------------


def files(settings: Settings) -> Iterator[Finding]:
    """Look who else may read secrets, or change what the service goes by."""
    count = 0
    for path, secret in looked_at(settings):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            yield wrong(f"{path} cannot be looked at: {error.strerror}", "correct the path, or who owns it")
            continue
        count += 1
        if mode & WRITABLE_BY_OTHERS:
            yield wrong(f"others may change {path} ({stat.filemode(mode)})", f"chmod go-w {path}")
        if secret and mode & GROUP_AND_OTHERS & ~WRITABLE_BY_OTHERS:
            mask = "700" if stat.S_ISDIR(mode) else "600"
            yield wrong(f"others may read {path}, which holds secrets ({stat.filemode(mode)})", f"chmod {mask} {path}")
    if count:
        yield well(f"looked at the modes of {count} files and folders")


def looked_at(settings: Settings) -> Iterator[tuple[Path, bool]]:
    """Go through all files of the settings, and whether they hold secrets."""
    if settings.file is not None:
        text = settings.file.read_text(encoding="utf-8")
        yield settings.file, any(f"{name}:" in text for name in ("decision_token", "admin_token", "reservation_secret"))
    yield from ((path, True) for path in settings.secrets)
    for path in (*settings.providers, *yaml_of(settings.provider_dirs)):
        yield path, holds(path, "api_key")
    for path in (*settings.sources, *yaml_of(settings.source_dirs)):
        yield path, holds(path, "headers")
    if settings.runs_sources and settings.data_folder.exists():
        yield settings.data_folder, True
    if settings.store.startswith("sqlite:///"):
        path = Path(settings.store.removeprefix("sqlite:///").partition("?")[0])
        if path.exists():
            yield path, False


def yaml_of(folders: Sequence[Path]) -> list[Path]:
    """Give the YAML files of folders."""
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.y*ml"))]


def holds(path: Path, field: str) -> bool:
    """Tell whether a file has a field that may be a secret."""
    try:
        return f"{field}:" in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def space(settings: Settings) -> Iterator[Finding]:
    """Look whether there is room for what is written."""
    if not settings.runs_sources:
        return
    folder = next(
        (path for path in (settings.data_folder, *settings.data_folder.absolute().parents) if path.exists()), Path()
    )
    if not os.access(folder, os.W_OK):
        yield wrong(f"{folder} cannot be written to", "choose another data folder, or change its owner")
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        yield wrong(f"only {free // 2**20} MB are free for {settings.data_folder}", "make room, or move data")


# ---- the network -----------------------------------------------------------------------------------------------------


def addresses(settings: Settings) -> Iterator[Finding]:
    """Look who can reach the service, and what they may do."""
    for name in ("listen", "grpc"):
        address: ListenAddress | None = getattr(settings, name)
        if address is None:
            continue
        if address.loopback:
            yield well(f"{name} {address}: only this machine can connect")
        elif name == "grpc" or settings.decision_token is None:
            who = "Envoy sends no token" if name == "grpc" else "no token is set"
            yield note(
                f"{name} {address}: whoever can connect may decide, for {who}",
                "let only those connect that should, by a firewall"
                if name == "grpc"
                else "set decision_token_file and admin_token_file, or keep others out by a firewall",
            )
        else:
            yield note(
                f"{name} {address}: tokens are sent in the clear",
                "put a proxy with TLS in front, or keep to a network of your own",
            )
        yield from taken(name, address)
    if settings.decision_token is not None and settings.admin_token is None:
        yield note("no admin token is set: nobody may reset or block", "set admin_token_file")
    if settings.admin_token is not None and settings.decision_token is None and not settings.listen.loopback:
        yield note("decisions need no token, only resets do", "set decision_token_file")


def taken(name: str, address: ListenAddress) -> Iterator[Finding]:
    """Look whether somebody listens already: perhaps this very service."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(tuple(address))
    except OSError as error:
        yield note(
            f"{name} {address} cannot be listened on: {error.strerror or error}",
            "nothing, if the service is running; else choose another address or end what listens there",
        )


def rules(settings: Settings) -> Iterator[Finding]:
    """Look whether there is anything to decide by, and what a lost store would mean."""
    entries, domains = settings.policies.entries, settings.policies.domains
    if not entries and not domains and not settings.runs_sources:
        yield wrong(
            "no policy is configured: there is nothing to decide by", "add policies to the file, or --policy api=100/1m"
        )
        return
    yield well(f"{len(entries)} policies, {len(domains)} domains")
    lost = sorted(name for name, entry in entries.items() if entry.policy.on_store_error == "allow")
    if lost and not settings.store.startswith("memory:"):
        yield note(
            f"while the store is lost, nothing limits {', '.join(lost[:5])}",
            "nothing, if that is meant; else on_store_error: local or deny",
        )


def proxies(trusted: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look whether anybody is believed who should not be."""
    if environment.get("FORWARDED_ALLOW_IPS", "").strip() == "*":
        yield wrong(
            "FORWARDED_ALLOW_IPS is *: the server believes every client who it says it is",
            "set it to the addresses of your proxies",
        )
    if not trusted:
        return
    everybody = [each for each in trusted if each.strip() in ("*", "0.0.0.0/0", "::/0")]
    if everybody:
        yield wrong(
            f"trusted proxies {everybody[0]}: every client can choose its address, and so its limits",
            "name the addresses or networks of your proxies only",
        )
        return
    try:
        TrustedProxies(trusted)
    except ConfigError as error:
        yield wrong(str(error), "write addresses such as 10.0.0.1 or networks such as 10.0.0.0/8")
    else:
        yield well(f"trusted proxies: {', '.join(trusted)}")


CHECKS: Final[tuple[Callable[[Settings], Iterator[Finding]], ...]] = (
    versions,
    rules,
    store,
    buses,
    addresses,
    files,
    space,
)
