"""A CallPlanner finds the provider of a request, the accounts that may be charged, the costs, and the key."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate._limiter.joint import LimiterAsk
from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import Decision
from tidegate.errors import Denied, ResourceUnknown
from tidegate.outbound._quota.cost import CallPlan, TokenEstimates, key_of, plan_call, request_of
from tidegate.outbound._quota.exchange import added_key, is_confidential, target_url
from tidegate.outbound._quota.gate_call import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidegate._limiter.limiter import AsyncLimiter, Limiter
    from tidegate._policy import Key, Policy
    from tidegate._runtime.clock import Clock
    from tidegate.outbound._providers.pool import Ceiling, Pool
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.accounts import Accounts
    from tidegate.outbound._quota.exchange import AddedKey, OutboundRequest, RequestOptions
    from tidegate.outbound._quota.request_tokens import RequestTokens

log: logging.Logger = logging.getLogger("tidegate.outbound")

OTHERS: Final = "others"  # in the key of the quota of requests beyond the number of accounts
MAX_CEILING_KEYS: Final = 100  # teams or tags of a ceiling that are remembered


class CallPlanner:
    """Plans calls: finds providers, accounts, ceilings and keys, and reads changed provider files."""

    def __init__(
        self,
        providers: Providers,
        accounts: Accounts,
        clock: Clock,
        make_limiter: Callable[[Policy], Limiter | AsyncLimiter],
        estimates: TokenEstimates,
        jitter: Callable[[], float],
        reload: int | None,
    ) -> None:
        """Plan calls to these providers; their files are checked every `reload` microseconds (None: never)."""
        self.providers = providers
        self.clock = clock
        self.accounts = accounts
        # Whether models that a provider file does not name share a quota: if callers that are not trusted name them.
        self.shares_unnamed_models: bool = False
        self.on_change: Callable[[], None] = lambda: None  # called when the files have changed
        self._make_limiter = make_limiter
        self._estimates = estimates
        self._jitter = jitter
        self._reload = reload
        self._next_reload = clock.steady() + (reload or 0)
        self._warned: set[str] = set()  # domains whose key was not sent, and warned about
        self._ceilings: dict[str, Limiter | AsyncLimiter] = {}
        self._ceiling_keys: dict[str, dict[Key, None]] = {}

    def find_provider(self, url: object) -> Provider | None:
        """Return the provider of a URL, after checking its files for changes."""
        if self._reload is not None and self.clock.steady() >= self._next_reload:
            self.reload_if_due()
        return self.providers.match(url)

    def reload_if_due(self) -> None:
        """Read changed provider files, if they were not checked lately."""
        if self._reload is not None and (now := self.clock.steady()) >= self._next_reload:
            self._next_reload = now + self._reload
            if self.providers.reload():
                self.on_change()

    def next_reload(self) -> int | None:
        """Return when the files are checked next, by steady time; None: never."""
        return None if self._reload is None or not self.providers.reloads else self._next_reload

    def are_current(self, changes: int) -> bool:
        """Return whether the provider files have not changed since they had changed so many times."""
        self.reload_if_due()
        return self.providers.changes == changes

    def find_again(self, provider: Provider, target: object) -> Provider:
        """Return the current provider of a URL, domain or name; the given one if it was removed."""
        try:
            return self.providers.find(target) or provider
        except ResourceUnknown:
            return provider

    def account(self, provider: Provider, call: OutboundRequest) -> Account:
        """Return the account that a request is charged to; of a pool, that of its first member."""
        provider = provider if provider.pool is None else provider.pool.members[0].provider
        return self._open_model_account(provider, call, request_of(provider, call))

    def _open_model_account(self, provider: Provider, call: OutboundRequest, request: RequestTokens | None) -> Account:
        """Return the account of a request's model, which may have its own limits."""
        if provider.has_one_account:
            return self.accounts.open(provider, provider.domain)
        model = None if request is None else request.model
        pattern = provider.model_pattern(model)
        key = key_of(provider, call, model, pattern, shares_unnamed=self.shares_unnamed_models)
        if self.accounts.is_full(provider.domain, key):
            key = (provider.domain, *([f"member={provider.member}"] if provider.member else ()), OTHERS)
        return self.accounts.open(provider.for_pattern(pattern), key)

    def _plan_call(
        self, account: Account, call: OutboundRequest, request: RequestTokens | None, options: RequestOptions
    ) -> list[CallPlan]:
        strict = account.provider.strict if options.strict is None else options.strict
        return plan_call(account, call, request, self._estimates, options.cost, options.tag, strict=strict)

    def candidates(self, provider: Provider, call: OutboundRequest, options: RequestOptions) -> list[Candidate]:
        """Return what a request may be charged to, the preferred account first; raises Denied if nothing can be.

        A provider without a pool has one account. A strict call may have two plans: all with its own bound come first.
        """
        pool = provider.pool
        if pool is None:
            request = request_of(provider, call, options.model) if provider.reads_requests else None
            account = self._open_model_account(provider, call, request)
            same = account.same_call
            if same is not None and same.provider is provider and not options.cost:
                return [same]
            plans = self._plan_call(account, call, request, options)
            if not provider.ceilings:
                own = [Candidate.of(provider, account, plan) for plan in plans]
                if account.fixed_cost is not None and not options.cost:
                    account.same_call = own[0]  # all such calls are planned in the same way
                return own
            return [
                Candidate.of(provider, account, plan, self._call_ceilings(account, plan, options)) for plan in plans
            ]
        members = [member for member in pool.members if not member.drained]
        found: list[list[Candidate]] = []
        alike_plans: dict[tuple[object, ...], list[CallPlan]] = {}
        requests: dict[tuple[object, ...], RequestTokens | None] = {}
        for member in members:
            kind = id(member.provider.profile), id(member.provider.prices)  # with the same ones: read and planned once
            if kind not in requests:
                requests[kind] = request_of(member.provider, call, options.model)
            account = self._open_model_account(member.provider, call, requests[kind])
            alike = kind, account.provider.limits
            if alike not in alike_plans:
                alike_plans[alike] = self._plan_call(account, call, requests[kind], options)
            found.append(
                [
                    Candidate.of(member.provider, account, plan, self._call_ceilings(account, plan, options))
                    for plan in alike_plans[alike]
                ]
            )
        conversation = conversation_of(pool, call, requests.values())
        order = pool.arrange(members, conversation, self._jitter, [own[0].plan.money for own in found])
        if not order:
            raise no_member(provider)
        arranged = [found[index][0] for index in order] + [each for index in order for each in found[index][1:]]
        arranged.sort(key=lambda each: each.account.is_key_doubted(each.model))
        usable = [each for each in arranged if not each.account.key_rejected] or arranged
        return [each for each in usable if each.plan.fits] or usable

    def _call_ceilings(self, account: Account, plan: CallPlan, options: RequestOptions) -> tuple[LimiterAsk, ...]:
        """Return the ceilings of a call; a lenient call reserves at most what each can ever allow."""
        provider = account.provider
        strict = provider.strict if options.strict is None else options.strict
        found = []
        for ceiling in provider.ceilings:
            money = plan.money if strict else min(plan.money, ceiling.limit.burst)
            limiter, key = self.open_ceiling(ceiling), ceiling.key(options.team, options.tag)
            if ceiling.per:
                self._note_key(ceiling, key)
            found.append(LimiterAsk(limiter, key, {ceiling.limit.unit: money}))
        return tuple(found)

    def _note_key(self, ceiling: Ceiling, key: Key) -> None:
        """Remember a key that is charged to a ceiling, for metrics; the one that is idle longest is dropped."""
        keys = self._ceiling_keys.setdefault(ceiling.policy.name, {})
        keys.pop(key, None)
        keys[key] = None
        if len(keys) > MAX_CEILING_KEYS:
            with suppress(StopIteration, RuntimeError, KeyError):  # another thread does the same
                del keys[next(iter(keys))]

    def ceiling_keys(self, ceiling: Ceiling) -> tuple[Key, ...]:
        """Return the keys that were charged to a ceiling last."""
        return tuple(self._ceiling_keys.get(ceiling.policy.name, ()))

    def open_ceiling(self, ceiling: Ceiling) -> Limiter | AsyncLimiter:
        """Return the limiter of a ceiling, with its current limit."""
        limiter = self._ceilings.get(ceiling.policy.name)
        if limiter is None:
            limiter = self._ceilings.setdefault(ceiling.policy.name, self._make_limiter(ceiling.policy))
        if limiter.policy != ceiling.policy:
            limiter.update(ceiling.policy)
        return limiter

    def account_of(self, call: OutboundRequest) -> Account | None:
        """Return the account that a request would be charged to; None: no provider limits it."""
        provider = self.find_provider(call.url)
        return None if provider is None else self.account(provider, call)

    @property
    def ceilings(self) -> tuple[Limiter | AsyncLimiter, ...]:
        """The limiters of ceilings that calls were charged to."""
        return tuple(self._ceilings.values())

    @property
    def limiters(self) -> list[Limiter | AsyncLimiter]:
        """The limiters of accounts and of ceilings."""
        return [*(account.limiter for account in tuple(self.accounts.values())), *tuple(self._ceilings.values())]

    def open_account(self, provider: Provider, key: Key) -> Account:
        """Return the account of a key, opened if needed, with the current limits of the provider."""
        return self.accounts.open(provider, key)

    def key_for(self, provider: Provider | None, call: OutboundRequest) -> AddedKey | None:
        """Return the provider's key if a request should carry it; over plain http it is not sent, with one warning."""
        added = added_key(provider, call)
        if provider is None or added is None or added.location.plain_http:
            return added
        if is_confidential(target_url(provider, call) or call.url):
            return added
        if provider.domain not in self._warned:
            self._warned.add(provider.domain)
            message = "the key of provider %s is not sent over plain http: use https, or allow it with %s"
            log.warning(message, provider.name, "key: {…, plain_http: true}")
        return None


def conversation_of(pool: Pool, call: OutboundRequest, requests: Iterable[RequestTokens | None]) -> str | None:
    """Return the conversation that a request belongs to, where a cache makes it cheaper to stay with one member.

    `requests` is what it asks for, as each kind of member counts it.
    """
    if not pool.sticky:
        return None
    prices = [None if request is None else request.price for request in requests]
    saves = any(price is None or price.saves_by_cache for price in prices)
    return (call.header(pool.sticky) or None) if saves or not prices else None


def no_member(provider: Provider) -> Denied:
    """Return the error of a call to a pool whose members are all drained."""
    decision = Decision.of_views(0, provider.limits, [View((0, NEVER, 0))] * len(provider.limits), within_limits=False)
    place = provider.file or "the file"
    return Denied(f"provider {provider.name}: all members are drained: add one to {place}", decision)
