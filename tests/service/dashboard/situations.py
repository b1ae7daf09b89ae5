"""Ten situations of a service, for screenshots: each is a configuration, and the traffic of each second."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.servers.valkey import ValkeyServer
from tests.service.dashboard.dashboard_service import (
    BUDGET,
    POLICIES,
    DashboardService,
    basic_service,
    full_service,
    send_traffic,
)
from tidegate.budget import TaskBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from random import Random

ATTACKER = "203.0.113.77"
ATTACK_STARTS = 8  # seconds after the start
TROUBLE_STARTS = 15  # seconds after the start


class Situation(NamedTuple):
    """A situation: how to open its service, and what happens in each second."""

    name: str
    open: Callable[[Path], AbstractContextManager[Any]]
    traffic: Callable[[Any, int, Random], None]


def batch(service: DashboardService, policy: str, keys: list[str]) -> None:
    """Send one call for each key."""
    service.http.post("/v1/batch", json={"policy": policy, "keys": keys})


def no_traffic(*_: object) -> None:
    """Send nothing."""


def busy(service: DashboardService, _second: int, random: Random) -> None:
    """Send ordinary traffic."""
    send_traffic(service, random)


def attack(service: DashboardService, second: int, random: Random) -> None:
    """Send ordinary traffic and, after a while, that of an attacker."""
    send_traffic(service, random)
    if second >= ATTACK_STARTS:
        batch(service, "login", [ATTACKER] * random.randint(50, 80))
        batch(service, "login", [f"198.51.100.{random.randint(1, 30)}" for _ in range(18)])


# ---- stores and files ------------------------------------------------------------------------------------------------


class StoreService(NamedTuple):
    """A service, and its store."""

    service: DashboardService
    valkey: ValkeyServer

    @property
    def url(self) -> str:
        """The URL of the service."""
        return self.service.url


@contextmanager
def open_with_valkey(folder: Path) -> Iterator[StoreService]:
    """Run a service on a Valkey server that can be killed."""
    with ValkeyServer() as valkey:
        policies = POLICIES.replace("30/10s", "30/10s, on_store_error: allow")
        with basic_service(folder, f"store: {valkey.url}\n{policies}") as service:
            yield StoreService(service, valkey)


def lose_store(running: StoreService, second: int, random: Random) -> None:
    """Send ordinary traffic; the store is killed."""
    if second == TROUBLE_STARTS:
        running.valkey.kill()
    send_traffic(running.service, random)


class FileService(NamedTuple):
    """A service, and its configuration file."""

    service: DashboardService
    file: Path

    @property
    def url(self) -> str:
        """The URL of the service."""
        return self.service.url


@contextmanager
def open_with_file(folder: Path) -> Iterator[FileService]:
    """Run a service whose file is read often."""
    with basic_service(folder, f"reload_every: 200ms\n{POLICIES}") as service:
        yield FileService(service, folder / "service.yaml")


def edit_file(running: FileService, second: int, random: Random) -> None:
    """Send ordinary traffic; the file is edited twice, the second time with a mistake."""
    text = running.file.read_text(encoding="utf-8")
    if second == ATTACK_STARTS:
        running.file.write_text(text.replace("2000/1m", "3000/1m"), encoding="utf-8")
    if second == TROUBLE_STARTS:
        running.file.write_text(text.replace("limits: 30/10s", "limits: 30/10parsecs"), encoding="utf-8")
    send_traffic(running.service, random)


# ---- names and numbers -----------------------------------------------------------------------------------------------

LONG_NAMES = """
policies:
  checkout-service-production-europe-west-3-orders-v2-create: 20/10s
  checkout-service-production-europe-west-3-orders-v2-refund: 5/10s
"""
REGIONS = ("eu-7", "eu-8", "us-1", "ap-southeast-2")


def long_names(service: DashboardService, _second: int, random: Random) -> None:
    """Send calls with long names that differ at their ends."""
    tenants = [f"tenant-of-a-customer-with-a-very-long-name-incorporated-{region}" for region in REGIONS]
    for suffix in ("create", "refund"):
        keys = [random.choice(tenants) for _ in range(12)]
        batch(service, f"checkout-service-production-europe-west-3-orders-v2-{suffix}", keys)


def one_policy(service: DashboardService, _second: int, random: Random) -> None:
    """Send calls to the only policy."""
    batch(service, "api", [f"user:{random.randint(1, 12)}" for _ in range(random.randint(5, 40))])


FIFTY_POLICIES = (
    "policies:\n" + "".join(f"  service-{number:02}: 200/10s\n" for number in range(49)) + "  login: 5/1m\n"
)


def fifty_policies(service: DashboardService, second: int, random: Random) -> None:
    """Send calls to fifty policies; two of them deny."""
    asks = [
        {"policy": f"service-{random.randint(0, 48):02}", "key": f"user:{random.randint(1, 90)}"} for _ in range(150)
    ]
    asks += [{"policy": "login", "key": f"203.0.113.{random.randint(1, 40)}"} for _ in range(25)]
    asks += [{"policy": "service-31", "key": "export-job"}] * (40 if second > ATTACK_STARTS else 2)
    service.http.post("/v1/batch", json={"asks": asks})


# ---- components ------------------------------------------------------------------------------------------------------


class BudgetService(NamedTuple):
    """A service, and the budget that it shows."""

    service: DashboardService
    budget: TaskBudget

    @property
    def url(self) -> str:
        """The URL of the service."""
        return self.service.url


@contextmanager
def open_with_budget(folder: Path) -> Iterator[BudgetService]:
    """Run a service with a budget of which little is left."""
    settings = {**BUDGET, "RATE_LIMIT_STORAGE_PATH": str(folder / "budget.db")}
    with (
        TaskBudget.from_env(settings) as budget,
        basic_service(folder, POLICIES, "--budget", "true", **settings) as service,
    ):
        budget.record_completed_tasks(10)
        yield BudgetService(service, budget)


def spend_budget(running: BudgetService, second: int, random: Random) -> None:
    """Complete tasks until the minute is used up and the hour nearly."""
    send_traffic(running.service, random)
    if second < 10:
        running.budget.record_completed_tasks(18)


def freeze_swarm(service: DashboardService, second: int, random: Random) -> None:
    """Send ordinary traffic; agents get 429 responses again and again."""
    send_traffic(service, random)
    if second in (6, 12):
        service.agents[second % 3].announce_reduced("crawler", "503 from the origin")
    if second in (9, 14, 20, 26):
        service.agents[second % 3].announce_reduced("openai", "received 429 response", retry_after=45)


SITUATIONS = (
    Situation("idle", basic_service, no_traffic),
    Situation("busy", full_service, busy),
    Situation("attack", basic_service, attack),
    Situation("store-lost", open_with_valkey, lose_store),
    Situation("bad-file", open_with_file, edit_file),
    Situation("long-names", lambda folder: basic_service(folder, LONG_NAMES), long_names),
    Situation("one-policy", lambda folder: basic_service(folder, "policies: {api: 30/10s}\n"), one_policy),
    Situation("fifty-policies", lambda folder: basic_service(folder, FIFTY_POLICIES), fifty_policies),
    Situation("budgets", open_with_budget, spend_budget),
    Situation("frozen-swarm", full_service, freeze_swarm),
)
