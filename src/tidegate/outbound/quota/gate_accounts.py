"""How a gate finds the provider of a request, its account and its key: the part that sends nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidegate.outbound.quota.cost import CallPlan, TokenEstimates, key_of, plan_call, request_of
from tidegate.outbound.quota.exchange import added_key, is_confidential

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.providers.registry import Providers
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.accounts import Accounts
    from tidegate.outbound.quota.exchange import AddedKey, OutboundRequest, RequestOptions
    from tidegate.outbound.quota.request_tokens import RequestTokens
    from tidegate.policy import Key

log: logging.Logger = logging.getLogger(__name__)


class GateAccounts:
    """The providers and accounts of a gate, which sets the attributes."""

    providers: Providers
    clock: Clock
    _estimates: TokenEstimates
    _accounts: Accounts
    _reload: int | None
    _next_reload: int
    _warned: set[str]

    def find_provider(self, url: object) -> Provider | None:
        """Return the provider of a URL, after checking its files for changes."""
        self._reload_if_due()
        return self.providers.match(url)

    def _reload_if_due(self) -> None:
        if self._reload is not None and self.clock.steady() >= self._next_reload:
            self._next_reload = self.clock.steady() + self._reload
            self.providers.reload()

    def account(self, provider: Provider, call: OutboundRequest) -> Account:
        """Return the account that a request is charged to."""
        return self._open_model_account(provider, call, request_of(provider, call))

    def _open_model_account(self, provider: Provider, call: OutboundRequest, request: RequestTokens | None) -> Account:
        """Return the account of a request's model, which may have its own limits."""
        model = None if request is None else request.model
        pattern = provider.model_pattern(model)
        return self.open_account(provider.for_pattern(pattern), key_of(provider, call, model, pattern))

    def _plan(self, provider: Provider, call: OutboundRequest, options: RequestOptions) -> tuple[Account, CallPlan]:
        """Return the account of a request, and what is reserved for it."""
        request = request_of(provider, call, options.model)
        account = self._open_model_account(provider, call, request)
        strict = provider.strict if options.strict is None else options.strict
        return account, plan_call(account, call, request, self._estimates, options.cost, options.tag, strict=strict)

    def account_of(self, call: OutboundRequest) -> Account | None:
        """Return the account that a request would be charged to; None: no provider limits it."""
        provider = self.find_provider(call.url)
        return None if provider is None else self.account(provider, call)

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts that are open."""
        return tuple(self._accounts.values())

    def open_account(self, provider: Provider, key: Key) -> Account:
        """Return the account of a key, opened if needed, with the current limits of the provider."""
        return self._accounts.open(provider, key)

    def key_for(self, provider: Provider | None, call: OutboundRequest) -> AddedKey | None:
        """Return the provider's key if a request should carry it; over plain http it is not sent, with one warning."""
        added = added_key(provider, call)
        if provider is None or added is None or added.location.plain_http or is_confidential(call.url):
            return added
        if provider.domain not in self._warned:
            self._warned.add(provider.domain)
            message = "the key of provider %s is not sent over plain http: use https, or allow it with %s"
            log.warning(message, provider.name, "key: {…, plain_http: true}")
        return None
