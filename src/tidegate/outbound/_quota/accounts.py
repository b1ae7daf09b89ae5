"""The accounts of a gate: opened on first use, dropped when idle."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Final

from tidegate._policy import Key
from tidegate._runtime.fork import at_fork, fork_safe
from tidegate.errors import Closed
from tidegate.outbound._capacity.shared_capacity import SharedCapacity
from tidegate.outbound._quota.account import Account, recovery_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.bus import Bus
    from tidegate.outbound._providers.provider import Provider

ALWAYS_KEPT: Final = 256  # accounts that are kept even if idle
MAX_ACCOUNTS: Final = (
    4096  # of a gate: models and credentials that others invent must not use up its memory (16 KB each)
)


class Accounts(dict[tuple[str, Key], Account]):
    """Accounts by domain and key. Iterate over a copy: threads may open others at the same time."""

    def __init__(self, clock: Clock, bus: Bus | None, make: Callable[[Provider, Key, SharedCapacity], Account]) -> None:
        """Start without accounts; `make` creates one."""
        super().__init__()
        self._clock = clock
        self._bus = bus
        self._make = make
        self._agent = uuid.uuid4().hex
        self._lock = fork_safe(threading.Lock())
        self._shared_capacities: dict[tuple[str, int | None], SharedCapacity] = {}
        self._drop_idle_at = ALWAYS_KEPT  # with this number of accounts, idle ones are dropped
        self.closed: bool = False
        at_fork(child=self._rename)

    def _rename(self) -> None:
        """Use another agent name in a forked process, since an agent ignores its own messages."""
        self._agent = uuid.uuid4().hex
        for shared_capacity in self._shared_capacities.values():
            shared_capacity.rename(self._agent)

    def open(self, provider: Provider, key: Key) -> Account:
        """Return the account of a key, opened if needed, with the current limits of the provider."""
        account_key = provider.domain, key
        account = self.get(account_key)
        if account is not None:
            account.last_used = self._clock.steady()
        if account is None or self.get(account_key) is not account:  # it was dropped in the meantime
            account = self._open(provider, key)
        if account.configured is not provider:
            with self._lock:
                account.update_provider(provider)
        return account

    def is_full(self, domain: str, key: Key) -> bool:
        """Return whether the account of a key is not open, and there are too many to open it."""
        if len(self) < MAX_ACCOUNTS or (domain, key) in self:
            return False
        with self._lock:
            if len(self) >= self._drop_idle_at:
                self._drop_idle()
        return len(self) >= MAX_ACCOUNTS

    def _open(self, provider: Provider, key: Key) -> Account:
        with self._lock:
            if self.closed:
                raise Closed("the gate is closed")
            account = self.get((provider.domain, key))
            if account is None:
                if len(self) >= self._drop_idle_at:
                    self._drop_idle()
                settings = recovery_settings(provider)  # models have their own limits, and recover at their own pace
                shared_capacity = self._shared_capacities.get((provider.domain, settings.interval))
                if shared_capacity is None:
                    shared_capacity = SharedCapacity(self._agent, settings, self._clock, self._bus)
                    self._shared_capacities[provider.domain, settings.interval] = shared_capacity
                account = self[provider.domain, key] = self._make(provider, key, shared_capacity)
            return account

    def _drop_idle(self) -> None:
        for account_key, account in tuple(self.items()):
            if account.idle():
                del self[account_key]
                if (
                    account.idle()
                ):  # still idle: a thread that found it has updated `last_used`, or will not find it again
                    account.account_capacity.remove()
                else:
                    self[account_key] = account
        self._drop_idle_at = max(ALWAYS_KEPT, 2 * len(self))

    def close(self) -> list[Account]:
        """Refuse to open more accounts; return those that were open."""
        with self._lock:
            self.closed = True
            accounts = list(self.values())
            self.clear()
        for shared_capacity in self._shared_capacities.values():
            shared_capacity.close()
        return accounts
