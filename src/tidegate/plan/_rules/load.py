"""Loads the rules of a replay: files of a middleware, service, providers or budget, or limits such as `api=100/1m`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError
from tidegate.outbound import Providers
from tidegate.plan._clock import ReplayClock
from tidegate.plan._rules.budget import BudgetRules
from tidegate.plan._rules.inbound import InboundRules
from tidegate.plan._rules.outbound import OutboundRules
from tidegate.plan._rules.service import ServiceRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.plan._rules.base import ReplayRules

REPLAYED_KINDS: Final = ("inbound", "service", "provider", "budget")
SHARED_KINDS: Final = ("provider", "budget")  # whose quotas all clients share


class RulesSpec(NamedTuple):
    """What to replay against: the kind of file, the files or the limits, and how addresses are read."""

    kind: str
    files: tuple[str | Path, ...] = ()
    limits: Mapping[str, tuple[str, ...]] = {}
    mapping: Mapping[str, object] | None = None  # the configuration of a middleware, instead of a file
    trusted_proxies: tuple[str, ...] = ()

    @property
    def file(self) -> str | Path:
        """The only file; raises ConfigError if there are several."""
        if len(self.files) != 1:
            raise ConfigError(f"expected one file of kind {self.kind}, not {len(self.files)}", field="--policy")
        return self.files[0]


def open_rules(spec: RulesSpec, *, has_durations: bool = True, shift: int = 0) -> ReplayRules:
    """Read rules; `shift` makes limits count for so many microseconds more or less."""
    clock = ReplayClock()
    if spec.limits:
        return ServiceRules.of_limits(
            spec.limits, clock, spec.trusted_proxies, has_durations=has_durations, shift=shift
        )
    if spec.kind == "inbound":
        config = spec.mapping if spec.mapping is not None else spec.file
        trusted = spec.trusted_proxies
        return InboundRules(config, clock, trusted_proxies=trusted, has_durations=has_durations, shift=shift)
    if spec.kind == "service":
        file = str(spec.file)
        return ServiceRules.load(file, clock, spec.trusted_proxies, has_durations=has_durations, shift=shift)
    if spec.kind == "provider":
        return open_providers(spec, has_durations=has_durations)
    if spec.kind == "budget":
        return BudgetRules(spec.file, clock, has_durations=has_durations)
    raise ConfigError(
        f"cannot be replayed: expected the file of a middleware, service, provider or budget, not of kind {spec.kind}",
        file=str(spec.file),
    )


def open_providers(spec: RulesSpec, *, has_durations: bool = True) -> OutboundRules:
    """Read files of providers."""
    providers = Providers.load(list(spec.files), (), permissions="ignore")
    return OutboundRules(providers, ReplayClock(), has_durations=has_durations)


def read_spec(given: Sequence[str | Path], kind: str = "inbound", trusted_proxies: Sequence[str] = ()) -> RulesSpec:
    """Return the rules of files of one kind, or of limits such as `api=100/1m,1000/1h`; raises ConfigError.

    `kind` is inbound (the file of a middleware), service (of a service), provider (files of providers), or budget (the
    file of a task budget).
    """
    if not given:
        raise ConfigError("expected rules, such as --policy config.yaml or --policy 'api=100/1m'", field="--policy")
    trusted = tuple(trusted_proxies)
    limits = [each for each in given if is_limit(each)]
    if not limits:
        return RulesSpec(kind, tuple(given), trusted_proxies=trusted)
    if len(limits) < len(given):
        raise ConfigError("files and limits such as 'api=100/1m' cannot be combined", field="--policy")
    pairs = [str(each).partition("=") for each in limits]
    found = {name.strip(): tuple(part.strip() for part in text.split(",")) for name, _, text in pairs}
    return RulesSpec("limits", limits=found, trusted_proxies=trusted)


def is_limit(text: str | Path) -> bool:
    """Return whether this is a limit such as `api=100/1m`, not the path of a file."""
    return isinstance(text, str) and "=" in text and not Path(text).exists()
