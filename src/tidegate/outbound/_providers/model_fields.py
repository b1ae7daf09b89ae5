"""Read what a provider file says of language models: `models`, `aliases`, `output_reserve` and `unbounded`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from tidegate._runtime.suggestions import closest
from tidegate.outbound._providers.profile import WEBSOCKET, matches_model
from tidegate.outbound._providers.provider import ModelLimits, OutputReserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy.config_value import ConfigValue
    from tidegate.core._limit import Limit
    from tidegate.outbound._providers.provider import Provider

ANY_MODEL: Final = "*"
DEFAULT_PERCENT: Final = 95  # of recent outputs that are not longer than what is reserved, with a profile
MISSPELLING_SIMILARITY: Final = 0.8  # other names are those of tools
PERCENTILE = re.compile(r"p([1-9][0-9]?)")


def read_model_limits(
    fields: dict[str, ConfigValue], read_limit: Callable[[ConfigValue], Limit]
) -> tuple[ModelLimits, ...]:
    """Read `models: {"gpt-*": [500/1m, "200_000/1m unit=tokens"]}`, in the order of the file."""
    if "models" not in fields:
        return ()
    found: list[ModelLimits] = []
    for pattern, setting in fields["models"].entries().items():
        hidden = next((each.pattern for each in found if matches_model(each.pattern, pattern)), None)
        if hidden is not None:
            raise setting.error(f"never applies, because {hidden!r} comes first: move it before {hidden!r}")
        limits = tuple(map(read_limit, setting.one_or_many()))
        if not limits:
            raise setting.error("needs a limit, such as 500/1m")
        check_names(setting, limits)
        found.append(ModelLimits(pattern, limits))
    if not found:
        raise fields["models"].error('needs a pattern with limits, such as {"gpt-*": 500/1m}')
    if found[-1].pattern != ANY_MODEL and not {"limit", "limits", "concurrency"}.intersection(fields):
        raise fields["models"].error('needs limits for other models: add "*" as the last pattern, or limits')
    return tuple(found)


def check_names(place: ConfigValue, limits: Sequence[Limit]) -> None:
    """Refuse two limits with the same name."""
    names = [limit.name for limit in limits]
    for name in names:
        if names.count(name) > 1:
            raise place.error(f"two limits are named {name!r}: rename one of them, as in '60/1m name=a'")


def read_aliases(fields: dict[str, ConfigValue]) -> dict[str, str]:
    """Read `aliases: {gpt-4o-latest: gpt-4o}`."""
    if "aliases" not in fields:
        return {}
    found = {name: setting.string() for name, setting in fields["aliases"].entries().items()}
    for name, setting in fields["aliases"].entries().items():
        if found[name] in found:
            raise setting.error(f"{found[name]} is itself an alias: use {found[found[name]]}")
    return found


def read_output_reserve(fields: dict[str, ConfigValue]) -> OutputReserve:
    """Read `output_reserve: p95` or `output_reserve: maximum`; the default is p95 with a profile, else the maximum."""
    if "output_reserve" not in fields:
        return OutputReserve(DEFAULT_PERCENT if "profile" in fields else None)
    text = fields["output_reserve"].string()
    percent = PERCENTILE.fullmatch(text)
    if percent is None and text != "maximum":
        raise fields["output_reserve"].error(
            f"expected a percentile from p1 to p99, or maximum, not {fields['output_reserve']}"
        )
    return OutputReserve(None if percent is None else int(percent[1]))


def read_unbounded(fields: dict[str, ConfigValue], provider: Provider) -> dict[str, dict[str, int]]:
    """Read `unbounded: {previous_response_id: {tokens: 50_000}, web_search: {tokens: 20_000, usd_micros: 10_000}}`."""
    if "unbounded" not in fields:
        return {}
    found: dict[str, dict[str, int]] = {}
    known = provider.counting.unbounded.names | {WEBSOCKET}
    units = ("tokens",) if provider.prices is None else ("tokens", provider.prices.unit)
    for name, setting in fields["unbounded"].entries().items():
        if name not in known and (meant := closest(name, known, MISSPELLING_SIMILARITY)) is not None:
            raise setting.error(f"the profile has no {name!r}: did you mean {meant!r}?")
        found[name] = {unit: amount.integer(0) for unit, amount in setting.fields(*units).items()}
        if not found[name]:
            raise setting.error("needs a cost, such as {tokens: 50_000}")
    return found
