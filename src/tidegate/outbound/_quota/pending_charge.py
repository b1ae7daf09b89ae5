"""Permits for requests that a program sends itself: a charge that the caller settles, as exactly as the transports do.

A permit must count until the provider has counted the request (see `arrival`). So the caller reports what became of it:

    arrived()       the provider has the request: a slow one is charged again from now on
    commit(usage)   the request is over: its slots are released and its tokens corrected; includes arrived()
    cancel()        the request was never sent: its permits are returned

At the end of a `with` block, a charge that is not settled is committed, after an exception too: the request may have
arrived. A charge that nobody settles counts from when it was taken:

    `acquire`           in flight until it is settled, or until the program drops the charge
    `try_acquire`       not in flight, except in a `with` block: the program may only want to know whether it may send
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.flow import complete_flow
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import period_text
from tidegate.errors import ConfigError, RateLimitError, StoreUnavailable, ValueConflict
from tidegate.outbound._providers.provider import REQUESTS_UNIT
from tidegate.outbound._quota.exchange import OutboundRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Cost
    from tidegate._runtime.flow import CallFlow
    from tidegate.core import Decision
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.charge import Charge

log: logging.Logger = logging.getLogger("tidegate.outbound")


class _PendingCharge:
    """Base class of PendingCharge and AsyncPendingCharge."""

    owned: bool = False  # whether only the holder of this object can settle the charge

    def __init__(
        self,
        run: Callable[[CallFlow[Any]], Any],
        account: Account | None,
        charge: Charge | None,
        decision: Decision | None = None,
    ) -> None:
        """Settle with the `run` of a gate. Without a charge, `decision` is the denial; None: no provider limits it."""
        self._run = run
        self.account = account
        self.charge = charge
        self._denial = decision
        self._open = [True] if charge is not None else []  # emptied by the one call that settles

    @property
    def decision(self) -> Decision | None:
        """What was decided; None: no provider limits the request."""
        return self._denial if self.charge is None else self.charge.decision

    @property
    def provider(self) -> str | None:
        """The name of the provider; None: no provider limits the request."""
        return None if self.account is None else self.account.provider.name

    @property
    def member(self) -> str:
        """The member of the pool that was charged."""
        return "" if self.account is None or self.charge is None else self.account.provider.member

    @property
    def allowed(self) -> bool:
        """Whether the request may be sent."""
        return self.decision is None or self.decision.allowed

    @property
    def limited(self) -> bool:
        """Whether any limit applied."""
        return self.decision is not None

    @property
    def settled(self) -> bool:
        """Whether nothing is left to settle."""
        return not self._open

    def __bool__(self) -> bool:
        """Return whether the request may be sent."""
        return self.allowed

    def __repr__(self) -> str:
        """Show the provider and the state."""
        state = "denied" if not self.allowed else "settled" if self.settled else "open"
        return f"<{type(self).__name__} {self.provider or 'unlimited'} {state}>"

    # ---- permits that nobody settles ---------------------------------------------------------------------------------

    def _track(self) -> None:
        """Count the permit as that of a request in flight, until it is settled."""
        account, charge = self.account, self.charge
        if account is not None and charge is not None and not charge.tracked_until:
            charge.tracked_until = MAX_INTEGER
            account.delays.track(charge)

    def __del__(self) -> None:
        """Count a charge that was dropped from when it was taken, and warn once if it holds a slot."""
        if not self.owned:  # also if it was not initialised
            return
        account, charge = self.account, self.charge
        if account is None or charge is None or self.settled:
            return
        charge.tracked_until = 0
        lease = next((limit.length for limit in account.provider.limits if limit.rules.holds_slots), None)
        if lease is not None and not account.warned_unsettled:
            account.warned_unsettled = True
            log.warning(
                "a permit of provider %s was not settled: its slot of 'concurrency' stays taken until its lease ends "
                "(%s). Call commit() or cancel(), or use the permit in a with block",
                self.provider,
                period_text(lease),
            )

    # ---- flows -------------------------------------------------------------------------------------------------------

    def _arrived_flow(self) -> CallFlow[None]:
        """Charge the request again from now on, if its response was slow; a second call has no effect."""
        if self.account is not None and self.charge is not None:
            yield from self.account.recharge_late_flow(self.charge, self._late_costs(self.account, self.charge))

    @staticmethod
    def _late_costs(account: Account, charge: Charge) -> tuple[int, ...]:
        """Return the costs to charge again, because the response was slow; none if that was decided before."""
        answered, charge.answered = charge.answered, True
        return () if answered else account.delays.recharge_costs(charge)

    def _commit_flow(self, usage: Cost | None) -> CallFlow[None]:
        """Settle a request that has arrived."""
        account, charge = self.account, self.charge
        if account is None or charge is None:
            return
        self._close()
        try:
            known = usage
            if isinstance(usage, Mapping):
                known = {unit: amount for unit, amount in usage.items() if unit in charge.units} or None
            settle = self._settle_flow(charge, known, usage if isinstance(usage, Mapping) else None)
            late = self._late_costs(account, charge)
            if late and charge.writes:  # several steps: it is known as settled before the first of them
                writes, charge.writes = charge.writes, ()
                yield ApplyStep(account.store.unleased, "acquire", (), None, None, writes)
            yield from complete_flow(account.recharge_late_flow(charge, late), settle)
        except (ConfigError, StoreUnavailable):
            self._open.append(True)  # may be tried again
            raise

    def _settle_flow(self, charge: Charge, known: Cost | None, spent: Mapping[str, int] | None) -> CallFlow[None]:
        """Commit the charge, if there is something to correct, and record what was spent."""
        try:
            if known is not None or charge.writes or (self.account is not None and self.account.settles):
                yield from charge.commit_flow(known)
        except (ConfigError, StoreUnavailable, ValueConflict, GeneratorExit):
            raise
        except BaseException:  # the task was cancelled: the store still makes the correction
            self._record(charge, spent)
            raise
        self._record(charge, spent)

    def _record(self, charge: Charge, spent: Mapping[str, int] | None) -> None:
        amount = charge.record_spending(spent)
        if self.account is not None:
            self.account.spent += amount

    def _cancel_flow(self) -> CallFlow[None]:
        """Return the permits of a request that was not sent."""
        charge = self.charge
        if charge is None:
            return
        self._close()
        charge.answered = True
        try:
            yield from charge.cancel_flow()
        except StoreUnavailable:
            self._open.append(True)
            raise

    def _close(self) -> None:
        try:
            self._open.pop()
        except IndexError:
            raise RateLimitError(f"the charge for provider {self.provider} is already settled") from None


class PendingCharge(_PendingCharge):
    """Permits of a provider for a request that the caller sends; see the module. A context manager."""

    def arrived(self) -> None:
        """Report that the provider has the request: a slow one counts from now on. Slots stay held until `commit`."""
        self._run(self._arrived_flow())

    def commit(self, usage: Cost | None = None) -> None:
        """Settle a request that has arrived; `usage` is what it really cost, such as `{"tokens": 921}`."""
        self._run(self._commit_flow(usage))

    def cancel(self) -> None:
        """Return the permits: the request was not sent, or the provider has refused it."""
        self._run(self._cancel_flow())

    def __enter__(self) -> Self:
        """Settle at the end of the block; the request is in flight until then."""
        self._track()
        return self

    def __exit__(self, *_: object) -> None:
        """Commit, unless it was settled before; after an exception too, because the request may have arrived."""
        if not self.settled:
            self.commit()


class AsyncPendingCharge(_PendingCharge):
    """Permits of a provider for a request that the caller sends, for tasks. An async context manager."""

    async def arrived(self) -> None:
        """Report that the provider has the request: a slow one counts from now on. Slots stay held until `commit`."""
        await self._run(self._arrived_flow())

    async def commit(self, usage: Cost | None = None) -> None:
        """Settle a request that has arrived; `usage` is what it really cost, such as `{"tokens": 921}`."""
        await self._run(self._commit_flow(usage))

    async def cancel(self) -> None:
        """Return the permits: the request was not sent, or the provider has refused it."""
        await self._run(self._cancel_flow())

    async def __aenter__(self) -> Self:
        """Settle at the end of the block; the request is in flight until then."""
        self._track()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit, unless it was settled before; after an exception too, because the request may have arrived."""
        if not self.settled:
            await self.commit()


def find_target(providers: Providers, target: object) -> tuple[Provider, OutboundRequest] | None:
    """Find the provider of a URL, a domain or a name, and describe a request to it; None: no limits."""
    provider = providers.find(target)
    if provider is None:
        return None
    url = str(target)
    if "://" not in url:
        host = provider.domain if url == provider.name else url
        url = f"https://[{host}]/" if ":" in host else f"https://{host}/"
    return provider, request_to(url)


@lru_cache(maxsize=1024)
def request_to(url: str) -> OutboundRequest:
    """Return a request that the program sends itself."""
    return OutboundRequest("GET", url, _no_header, _no_body, False, _is_unreached, False, False, True)  # noqa: FBT003 - only `is_permit`


def _no_header(_name: str) -> str | None:
    return None


def _no_body() -> bytes | None:
    return None


def _is_unreached(_error: BaseException) -> bool:
    return False


def read_cost(cost: Cost | None) -> Mapping[str, int] | None:
    """Return a cost by unit: an integer counts requests; None is the provider's own cost."""
    if cost is None or isinstance(cost, Mapping):
        return cost
    if isinstance(cost, bool) or not isinstance(cost, int) or cost < 0:
        expected = "an integer of at least 0, or a mapping of units to integers"
        raise ConfigError(f"must be {expected}, not {cost!r}", field="cost")
    return {REQUESTS_UNIT: cost}


def check_money_given(account: Account, cost: Mapping[str, int] | None) -> None:
    """Refuse a charge without its money: only the caller knows what the request will cost."""
    prices = account.provider.prices
    limited = prices is not None and (prices.unit in account.units or account.provider.ceilings)
    if prices is not None and limited and prices.unit not in (cost or {}):
        message = f"needs the money that the request may cost, such as {{{prices.unit!r}: 5000}}"
        raise ConfigError(f"{message}: provider {account.provider.name} limits it", field="cost")
