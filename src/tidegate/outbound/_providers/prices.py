"""Prices: what the calls of each model cost, from a file of the user. tidegate ships none, because prices change.

    date: 2026-11-01                  # when the prices were read from the provider's page
    currency: usd                     # the default
    models:                           # per million tokens; the first pattern that matches applies
      gpt-4o-mini: {input: 0.15, cached: 0.075, output: 0.60}
      gpt-4o*: {input: 2.50, cached: 1.25, output: 10}
      dall-e-3: {kinds: {image: 0.04}}    # per image; the profile says which calls are of a kind
    default: {input: 15, output: 60}  # for other models; without it, their calls are refused

Amounts are integers: millionths of the currency (`usd_micros`). A price per million tokens is therefore an integer
number of micros per million tokens. Each call is rounded up to a whole micro, so a sum of calls is never too low.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.config_value import ConfigValue, load
from tidegate._policy.units import MICROS, MILLION
from tidegate._runtime.suggestions import hint
from tidegate.core._bounds import MAX_INTEGER, ceil_div
from tidegate.errors import ConfigError, ResourceUnknown
from tidegate.outbound._providers.profile import matches_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.outbound._providers.profile import Profile, UsagePart

DEFAULT_CURRENCY: Final = "usd"
CURRENCY = re.compile(r"[a-z]{3}")
TOKEN_PRICES: Final = ("input", "cached", "cache_write", "output", "audio", "audio_output")
CALL_PRICES: Final = ("request", "kinds")
PRICES_FIELDS: Final = ("date", "currency", "models", "default")


class ModelPrice(NamedTuple):
    """The price of a model: micros per million tokens, per request, and per unit of a kind of call, such as an image.

    `cached` is the price of input that the provider read from its cache, `cache_write` of input that it wrote there.
    `audio` is the price of audio input, `audio_output` of audio output. `only_kinds`: the file has no other price for
    the model, so the cost of calls of other kinds is unknown.
    """

    unit: str
    input: int = 0
    cached: int = 0
    cache_write: int = 0
    output: int = 0
    request: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    audio: int = 0
    audio_output: int = 0
    only_kinds: bool = False

    def estimate(self, input_tokens: int, output_tokens: int) -> int:
        """Return the most that this many tokens can cost, whatever part of them is cached or audio."""
        dearest = max(self.input, self.cached, self.cache_write, self.audio)
        return min(MAX_INTEGER, ceil_div(dearest * input_tokens + self.dearest_output * output_tokens, MILLION))

    @property
    def dearest_output(self) -> int:
        """The highest price of a million tokens of output."""
        return max(self.output, self.audio_output)

    def rank(self) -> tuple[int, int, int]:
        """Return what distinguishes a dearer price from a cheaper one."""
        return self.estimate(MILLION, MILLION), max((each for _, each in self.kinds), default=0), self.request

    @property
    def saves_by_cache(self) -> bool:
        """Whether input that is read from a cache is cheaper."""
        return self.cached < self.input

    def fee(self, kind: str = "", amount: int = 0) -> int:
        """Return what a request costs apart from its tokens; `amount` is how many of a kind it asks for."""
        return min(MAX_INTEGER, self.request + dict(self.kinds).get(kind, 0) * amount)

    def output_within(self, amount: int, input_tokens: int) -> int:
        """Return how many tokens of output this amount pays for, after the input."""
        if not self.dearest_output:
            return MAX_INTEGER
        return max(0, amount - self.estimate(input_tokens, 0)) * MILLION // self.dearest_output


def usage_cost(price: ModelPrice, parts: Mapping[UsagePart, int], profile: Profile) -> int:
    """Return the cost of the tokens that a response reports."""
    if "input" not in parts and "output" not in parts:
        dearest = max(getattr(price, name) for name in TOKEN_PRICES)
        return min(MAX_INTEGER, ceil_div(dearest * parts.get("total", 0), MILLION))
    cached, written = parts.get("cache_read", 0), parts.get("cache_write", 0)
    fresh = parts.get("input", 0)
    if not profile.cache_apart:
        fresh = max(0, fresh - cached)
    output = parts.get("output", 0)
    if profile.reasoning_apart:
        output += parts.get("reasoning", 0)
    total = fresh * price.input + cached * price.cached + written * price.cache_write + output * price.output
    # Audio is part of the input and the output that are reported, at another price.
    total += parts.get("audio", 0) * max(0, price.audio - price.input)
    total += parts.get("audio_output", 0) * max(0, price.audio_output - price.output)
    return min(MAX_INTEGER, ceil_div(total, MILLION))


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a provider's models, as of a date, in one currency. Immutable."""

    date: date
    currency: str = DEFAULT_CURRENCY
    models: tuple[tuple[str, ModelPrice], ...] = ()
    default: ModelPrice | None = None
    file: str | None = field(default=None, compare=False)

    @property
    def unit(self) -> str:
        """The unit that amounts are counted in, such as `usd_micros`."""
        return self.currency + MICROS

    def find(self, model: str | None, kind: str = "") -> ModelPrice:
        """Return the price of a model for calls of a kind, such as `image`.

        Raises ResourceUnknown if neither the model nor the default has a price for such a call.
        """
        listed: ModelPrice | None = None
        if model is not None:
            for pattern, price in self.models:
                if matches_model(pattern, model):
                    listed = price
                    break
        for found in (listed, self.default):
            if found is not None and (not found.only_kinds or kind in dict(found.kinds)):
                return found
        raise ResourceUnknown(f"{self.file or 'the prices'}: {self._unknown(model, listed)}")

    def _unknown(self, model: str | None, listed: ModelPrice | None) -> str:
        """Return why the price of a call is unknown; `listed` is the price of its model, which does not fit."""
        if listed is not None or self.default is not None:
            whose = "the default price" if listed is None else f"the price of the model {model!r}"
            kinds = ", ".join(name for name, _ in (listed or self.default or ModelPrice("")).kinds)
            unknown = f"{whose} is per {kinds} only, so the cost of another kind of call is unknown"
            return f"{unknown}: add input and output, or request; write 0 for what is free"
        if model is None:
            unknown = "a request names no model, so its price is unknown"
            return f"{unknown}: name it with request_options(model=…), or add a default price"
        near = hint(model, [pattern for pattern, _ in self.models])
        return f"there is no price for the model {model!r}: add it, or a default price{near}"


def find_prices(setting: ConfigValue, profile: Profile) -> Prices:
    """Read the prices that a provider file names: the path of a file relative to that file, or a mapping.

    A kind of calls that no path of the profile is of is refused: its calls would cost nothing.
    """
    kinds = tuple(dict.fromkeys(each.kind for each in profile.endpoints if each.kind))
    if setting.is_mapping:
        return _prices(setting, kinds)
    path = Path(setting.file or "").parent / Path(setting.string()).expanduser()
    if not path.is_file():
        raise setting.error(f"cannot read {path}: there is no such file")
    return read_prices(path, kinds)


def read_prices(source: str | Path | Mapping[str, object], kinds: Sequence[str] | None = None) -> Prices:
    """Read prices from a file or a mapping; `kinds` are the kinds of calls that there are, if they are known."""
    return _prices(load(source), kinds)


def _prices(section: ConfigValue, kinds: Sequence[str] | None) -> Prices:
    fields = section.fields(*PRICES_FIELDS)
    if "date" not in fields:
        raise section.error("needs the date on which the prices were valid, such as date: 2026-11-01")
    currency = fields["currency"].string() if "currency" in fields else DEFAULT_CURRENCY
    if not CURRENCY.fullmatch(currency):
        raise fields["currency"].error(f"expected three lower-case letters such as usd or eur, not {currency!r}")
    models: list[tuple[str, ModelPrice]] = []
    for pattern, setting in (fields["models"].entries() if "models" in fields else {}).items():
        hidden = next((known for known, _ in models if matches_model(known, pattern)), None)
        if hidden is not None:
            raise setting.error(f"never applies, because {hidden!r} comes first: move it before {hidden!r}")
        models.append((pattern, _price(setting, currency + MICROS, kinds)))
    if not models and "default" not in fields:
        raise section.error("needs models with prices, such as models: {gpt-4o: {input: 2.50, output: 10}}")
    default = _price(fields["default"], currency + MICROS, kinds) if "default" in fields else None
    return Prices(_date(fields["date"]), currency, tuple(models), default, section.file)


def _date(setting: ConfigValue) -> date:
    if isinstance(setting.raw, date):
        return setting.raw
    try:
        return date.fromisoformat(setting.string())
    except ConfigError:
        raise
    except ValueError:
        raise setting.error(f"expected a date such as 2026-11-01, not {setting}") from None


def _price(setting: ConfigValue, unit: str, known_kinds: Sequence[str] | None) -> ModelPrice:
    """Read `{input: 2.50, cached: 1.25, output: 10, request: 0.01}`; write 0 for what is free."""
    fields = setting.fields(*TOKEN_PRICES, *CALL_PRICES)
    found: dict[str, Any] = {name: entry.millionths() for name, entry in fields.items() if name != "kinds"}
    if "kinds" in fields:
        for kind, entry in fields["kinds"].entries().items():
            if known_kinds is not None and kind not in known_kinds:
                raise entry.error(_unknown_kind(kind, known_kinds))
        found["kinds"] = tuple((kind, entry.millionths()) for kind, entry in fields["kinds"].entries().items())
    if not found:
        raise setting.error("needs a price, such as {input: 2.50, output: 10} per million tokens")
    for needed in ("input", "output"):
        if needed not in found and set(TOKEN_PRICES).intersection(found):
            raise setting.error(f"needs the price of {needed} too; write {needed}: 0 if there is none")
    whole, output = found.get("input", 0), found.get("output", 0)
    usual = {"cached": whole, "cache_write": whole, "audio": whole, "audio_output": output}
    return ModelPrice(unit, **{**usual, **found}, only_kinds=found.keys() == {"kinds"})


def _unknown_kind(kind: str, known: Sequence[str]) -> str:
    """Return why a kind of calls is refused."""
    there_are = f"only of {', '.join(known)}" if known else "of none"
    problem = f"the profile has no calls of the kind {kind!r}, {there_are}, so its price would apply to none"
    return problem + hint(kind, known)
