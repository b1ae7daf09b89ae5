"""Read a provider's YAML file. Errors name the file, line and field, and never contain a value that may be a key.

    domain: financialmodelingprep.com
    limit: 300
    period: 1m
    api_key: …

docs/reference/outbound.md lists the other fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from tidegate._policy.config_value import ConfigValue, load
from tidegate._policy.loader import InvalidYAMLError
from tidegate._policy.model import OnStoreError
from tidegate._policy.setting_values import VARIABLE, expand_variables
from tidegate._policy.units import MILLION
from tidegate._runtime.suggestions import closest, did_you_mean
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._bounds import SECOND
from tidegate.core._limit import Limit, default_algorithm, parse_period
from tidegate.errors import ConfigError
from tidegate.outbound._providers.hosts import normal_host
from tidegate.outbound._providers.model_fields import (
    ANY_MODEL,
    check_names,
    read_aliases,
    read_model_limits,
    read_output_reserve,
    read_unbounded,
)
from tidegate.outbound._providers.money import check_unit, parse_limit, to_micros
from tidegate.outbound._providers.pool_file import read_ceilings, read_pool
from tidegate.outbound._providers.prices import find_prices
from tidegate.outbound._providers.profile import TOKEN_UNITS, Profile
from tidegate.outbound._providers.profile_file import NO_PROFILES, find_profile, profile_of_domain
from tidegate.outbound._providers.provider import (
    CONCURRENCY_UNIT,
    EndpointCost,
    KeyLocation,
    Learn,
    Provider,
    QuotaScope,
    Retries,
)
from tidegate.outbound._providers.secret import Secret

if TYPE_CHECKING:
    from tidegate._policy import Cost
    from tidegate.outbound._providers.prices import Prices

Fields = dict[str, ConfigValue]

MISSPELLING_SIMILARITY: Final = 0.8  # a unit at least this similar to a known one is taken for a misspelling of it
LIMIT_FIELDS: Final = ("limit", "period", "unit", "algorithm", "burst", "timezone", "reset_day", "reset_hour")
PROVIDER_FIELDS: Final = (
    "domain",
    "name",
    "limits",
    "concurrency",
    "endpoints",
    "per",
    "api_key",
    "api_key_file",
    "key",
    "learn",
    "retries",
    "estimate",
    "on_store_error",
    "profile",
    "models",
    "aliases",
    "output_reserve",
    "strict",
    "unbounded",
    "price",
    "pool",
    "spend",
)
CALENDAR_FIELDS: Final = ("timezone", "reset_day", "reset_hour")
DEFAULT_SLOT_LEASE: Final = "2m"  # how long a slot is held at most: most clients time out long before
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
YAML_TOKEN = re.compile(r"'(?:[,:?\[\]{}-]|<[a-z ]+>)'")  # as the YAML parser names it


def read_provider(source: str | Path | Mapping[str, object], profiles: Mapping[str, Path] = NO_PROFILES) -> Provider:
    """Read a provider from a file or a mapping; `profiles` are the files of profiles that the user adds, by name."""
    try:
        section = load(source)
    except InvalidYAMLError as error:  # the YAML parser may quote a part of a key
        raise InvalidYAMLError(QUOTED.sub(_hide_value, error.problem), file=error.file, line=error.line) from None
    fields = section.fields(*LIMIT_FIELDS, *PROVIDER_FIELDS)
    if "domain" not in fields:
        raise section.error("needs a domain, such as financialmodelingprep.com")
    if "pool" not in fields:
        return _read_fields(section, fields, profiles)
    name = _text(fields, "name")

    def read_member(own: Fields, member: str, url: str) -> Provider:
        return replace(_read_fields(section, own, profiles, name), member=member, url=url)

    pool = read_pool(fields["pool"], fields, read_member)
    first = pool.members[0].provider  # the pool has the limits of its members, and no key of its own
    return replace(first, pool=pool, member="", url="", api_key=None, key_from=None, key_location=None)


def _read_fields(
    section: ConfigValue, fields: Fields, profiles: Mapping[str, Path], name: str | None = None
) -> Provider:
    prices = _prices(fields, profiles)
    models = read_model_limits(fields, partial(read_limit, algorithm=_text(fields, "algorithm"), prices=prices))
    limits = _limits(section, fields, dict(models).get(ANY_MODEL), prices)
    key, key_from = _api_key(fields)
    options: dict[str, Any] = {
        "name": name or _text(fields, "name") or (Path(section.file).stem if section.file else ""),
        "per": _per(fields),
        "api_key": key,
        "key_from": key_from,
        "key_location": _key_location(fields, key),
        "learn": cast("Learn", _choice(fields, "learn", get_args(Learn), "lower")),
        "on_store_error": cast("OnStoreError", _choice(fields, "on_store_error", get_args(OnStoreError), "deny")),
        "retries": _retries(fields),
        "estimate": _estimate(fields, limits + tuple(limit for each in models for limit in each.limits)),
        "profile": _profile(fields, profiles),
        "models": models,
        "aliases": read_aliases(fields),
        "output_reserve": read_output_reserve(fields),
        "strict": fields["strict"].boolean() if "strict" in fields else False,
        "prices": prices,
        "file": section.file,
    }
    domain = _domain(fields["domain"])
    options["ceilings"] = read_ceilings(fields, domain, prices, options["on_store_error"], read_limit)
    with section.locate_errors(**fields):
        provider = Provider(domain, limits, **options)
    provider = replace(provider, endpoints=_endpoints(fields, provider), unbounded=read_unbounded(fields, provider))
    _check_units(fields, provider)
    return provider


def _profile(fields: Fields, profiles: Mapping[str, Path]) -> Profile | None:
    """Return the profile that the file names, or else the one of its domain."""
    if "profile" in fields:
        return find_profile(fields["profile"], profiles)
    return profile_of_domain(_domain(fields["domain"]), profiles)


def _prices(fields: Fields, profiles: Mapping[str, Path]) -> Prices | None:
    """Read `price: prices.yaml`; the profile says what a response reports, and so what is paid for."""
    if "price" not in fields:
        return None
    profile = _profile(fields, profiles)
    if profile is None:
        raise fields["price"].error("needs a profile, which says how tokens are counted, such as profile: openai")
    return find_prices(fields["price"], profile)


def _check_units(fields: Fields, provider: Provider) -> None:
    """Refuse money limits without a known cost of a call, and misspelled units, which nothing would charge."""
    told = set(provider.estimate)
    for endpoint in provider.endpoints:
        told.update(endpoint.cost if isinstance(endpoint.cost, Mapping) else ())
    prices = provider.prices
    known = TOKEN_UNITS if prices is None else (*TOKEN_UNITS, prices.currency, prices.unit)
    place = fields.get("limits") or fields.get("unit") or fields["domain"]
    limits = (*provider.limits, *(limit for each in provider.models for limit in each.limits))
    for unit in dict.fromkeys(limit.unit for limit in limits):
        with place.locate_errors():
            check_unit(unit, prices, told)
        if unit in told or unit in known or unit == CONCURRENCY_UNIT:
            continue
        if closest(unit.lower(), known, MISSPELLING_SIMILARITY) is not None:
            raise place.error(f"nothing is counted in the unit {unit!r}: {did_you_mean(unit.lower(), known)}")


def _hide_value(quoted: re.Match[str]) -> str:
    return quoted[0] if YAML_TOKEN.fullmatch(quoted[0]) else "'…'"


def _domain(setting: ConfigValue) -> str:
    text = setting.string()
    if "//" in text or "/" in text or "@" in text:
        raise setting.error("expected only a domain such as example.com: remove the scheme, user and path")
    if "*" in text:
        raise setting.error(f"expected a domain such as example.com, not {setting}: subdomains are always included")
    bare = text.removeprefix("[").removesuffix("]")
    if bare.count(":") == 1 or "]:" in bare:
        raise setting.error(
            f"expected a domain without a port, not {setting}: all ports of a host share the quota of its provider"
        )
    domain = normal_host(bare)
    if domain is None:
        raise setting.error(f"expected a domain such as example.com, not {setting}")
    return domain


# ---- limits ----------------------------------------------------------------------------------------------------------


def _limits(
    section: ConfigValue,
    fields: Fields,
    of_all_models: tuple[Limit, ...] | None = None,
    prices: Prices | None = None,
) -> tuple[Limit, ...]:
    """Read `limit` and `period`, or `limits`, and `concurrency`; by default, the limits of all models."""
    limits: list[Limit] = []
    if "limits" in fields:
        for other in LIMIT_FIELDS:
            if other in fields and other != "algorithm":
                raise fields[other].error(
                    "cannot be combined with 'limits': move it into an entry of 'limits', or remove 'limits'"
                )
        limits += [read_limit(entry, _text(fields, "algorithm"), prices) for entry in fields["limits"].one_or_many()]
    elif of_all_models is not None and "limit" not in fields and "period" not in fields:
        limits += of_all_models
    elif "limit" in fields or "period" in fields or "concurrency" not in fields:
        limits.append(_limit(section, fields, prices=prices))
    if "concurrency" in fields:
        limits.append(_concurrency(fields["concurrency"]))
    check_names(fields.get("limits", section), limits)
    return tuple(limits)


def read_limit(
    entry: ConfigValue, algorithm: str | None = None, prices: Prices | None = None, *other_fields: str
) -> Limit:
    """Read an entry of `limits`: `300/1m`, or a mapping, which may have `other_fields` as well."""
    if entry.is_mapping:
        if "per" not in other_fields and (per := entry.entries().get("per")):
            raise per.error("cannot be set for a single limit: set it in an entry of 'spend', or for the whole file")
        return _limit(entry, entry.fields(*LIMIT_FIELDS, "name", *other_fields), algorithm, prices)
    text = entry.string()
    with entry.locate_errors():
        limit = parse_limit(text, prices)
    if limit.calendar or limit.algorithm in text.split() or limit.burst != limit.quota:
        return limit
    with entry.locate_errors():
        return replace(limit, algorithm=algorithm or "sliding_log")


def _limit(location: ConfigValue, fields: Fields, algorithm: str | None = None, prices: Prices | None = None) -> Limit:
    """Read a limit from `limit`, `period` and their options.

    The default algorithm is an exact log: no window of the provider exceeds the limit, wherever it begins.
    """
    if "limit" in fields and (fields["limit"].is_list or "/" in str(fields["limit"])):
        raise fields["limit"].error(f"expected an integer, not {fields['limit']}: did you mean 'limits'?")
    for needed, example in (("limit", "300"), ("period", "1m")):
        if needed not in fields:
            raise location.error(f"needs a {needed}, such as {needed}: {example}")
    period = fields["period"].string()
    money = prices is not None and "unit" in fields and fields["unit"].string() in (prices.currency, prices.unit)
    in_currency = money and prices is not None and fields["unit"].string() == prices.currency
    if not in_currency and "unit" in fields and "." in str(fields["limit"]):  # decimals are for money only
        with fields["unit"].locate_errors():
            check_unit(fields["unit"].string(), prices)
    quota = fields["limit"].millionths() if in_currency else fields["limit"].integer()
    if "algorithm" in fields:
        algorithm = fields["algorithm"].choice(*ALGORITHMS)
    elif any(each in fields for each in CALENDAR_FIELDS):
        algorithm = "calendar_window"
    elif "burst" in fields:
        algorithm = "token_bucket"
    else:
        algorithm = default_algorithm(period, algorithm or "sliding_log")
    texts = {option: fields[option].string() for option in ("unit", "timezone", "name") if option in fields}
    numbers = {option: fields[option].integer(0) for option in ("burst", "reset_day", "reset_hour") if option in fields}
    with location.locate_errors(**{**fields, "quota": fields["limit"]}):
        limit = Limit(quota, period, algorithm, **texts, **numbers)  # type: ignore[arg-type]  # by name
        return to_micros(limit, prices, MILLION) if in_currency else limit


def _concurrency(setting: ConfigValue) -> Limit:
    """Read `concurrency: 5`, or with how long a request may hold its slot: `{limit: 5, lease: 10m}`."""
    quota, lease, location = setting, None, setting
    if setting.is_mapping:
        fields = setting.fields("limit", "lease")
        if "limit" not in fields:
            raise setting.error("needs a limit, such as concurrency: {limit: 5, lease: 2m}")
        quota, lease = fields["limit"], fields.get("lease")
        location = lease or setting
    with location.locate_errors():
        return Limit(
            quota.integer(),
            lease.string() if lease else DEFAULT_SLOT_LEASE,
            "concurrency",
            unit=CONCURRENCY_UNIT,
            name="concurrency",
        )


# ---- other fields ----------------------------------------------------------------------------------------------------


def _api_key(fields: Fields) -> tuple[Secret | None, str | None]:
    """Read the key, and where it is if not in this file: a variable in `api_key: ${NAME}`, or `api_key_file`."""
    if "api_key_file" in fields:
        if "api_key" in fields:
            raise fields["api_key_file"].error("cannot be combined with 'api_key'")
        return _key_in_file(fields["api_key_file"])
    if "api_key" not in fields:
        return None, None
    try:
        text = "" if fields["api_key"].is_null else fields["api_key"].string()
    except ConfigError:
        raise fields["api_key"].error("expected a string: put the key in quotes") from None
    if VARIABLE.fullmatch(text) is None:  # a literal key may contain a dollar sign
        return Secret(text) if text else None, None
    return Secret(expand_variables(fields["api_key"], os.environ).string()), text


def _key_in_file(setting: ConfigValue) -> tuple[Secret, str]:
    """Read a key from a file of its own, such as a secret of Docker or Kubernetes."""
    path = Path(setting.file or "").parent / Path(setting.string()).expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise setting.error(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if not text:
        raise setting.error(f"{path} is empty: it should contain the key")
    return Secret(text), str(path)


def _key_location(fields: Fields, key: Secret | None) -> KeyLocation | None:
    """Read where the key is sent: `key: {header: Authorization, prefix: Bearer}` or `key: {query: apikey}`.

    A string is short for one of them: `bearer`, `header X-Api-Key`, `query apikey`.
    """
    if "key" not in fields:
        return None
    if not fields["key"].is_mapping:
        fields = {**fields, "key": _key_preset(fields["key"])}
    location = fields["key"].fields("header", "query", "prefix", "plain_http")
    if ("header" in location) == ("query" in location):
        raise fields["key"].error("expected either header or query, such as {header: X-Api-Key} or {query: apikey}")
    if key is None:
        raise fields["key"].error("needs an api_key to send, but none is given")
    plain = location["plain_http"].boolean() if "plain_http" in location else False
    if "query" in location:
        if "prefix" in location:
            raise location["prefix"].error("can only be combined with 'header'")
        return KeyLocation("query", location["query"].string(), plain_http=plain)
    name = location["header"].string()
    if not HEADER_NAME.fullmatch(name):
        raise location["header"].error(f"expected a header name such as X-Api-Key, not {location['header']}")
    if any(ord(letter) < 32 or ord(letter) > 126 for letter in key.reveal()):  # noqa: PLR2004 - what a header can hold
        place = fields.get("api_key") or fields["api_key_file"]
        raise place.error("contains a character that is not allowed in a header: use printable ASCII characters")
    prefix = _text(location, "prefix")
    return KeyLocation("header", name, f"{prefix} " if prefix else "", plain)


def _key_preset(setting: ConfigValue) -> ConfigValue:
    """Return the mapping that a short form stands for."""
    words = setting.string().split()
    if words == ["bearer"]:
        return replace(setting, raw={"header": "Authorization", "prefix": "Bearer"})
    if len(words) == 2 and words[0] in ("header", "query"):  # noqa: PLR2004 - the kind and its name
        return replace(setting, raw={words[0]: words[1]})
    raise setting.error(f"expected bearer, 'header NAME' or 'query NAME', such as query apikey, not {setting}")


def _per(fields: Fields) -> tuple[QuotaScope, ...]:
    if "per" not in fields:
        return ()
    found = {entry.choice(*get_args(QuotaScope)) for entry in fields["per"].one_or_many()}
    return cast("tuple[QuotaScope, ...]", tuple(sorted(found)))


def _retries(fields: Fields) -> Retries:
    """Read `retries: 2`, or `{max: 2, within: 30s}`."""
    if "retries" not in fields:
        return Retries()
    setting = fields["retries"]
    if not setting.is_mapping:
        return Retries(setting.integer(0, 10))
    parts = setting.fields("max", "within")
    max_retries = parts["max"].integer(0, 10) if "max" in parts else 2
    return Retries(max_retries, _seconds(parts["within"]) if "within" in parts else Retries().within)


def _seconds(setting: ConfigValue) -> float:
    with setting.locate_errors():
        return parse_period(setting.string()) / SECOND


def _estimate(fields: Fields, limits: tuple[Limit, ...]) -> dict[str, int]:
    """Read the assumed cost of a request until its response reports the real one: `estimate: {tokens: 800}`."""
    if "estimate" not in fields:
        return {}
    units = sorted({limit.unit for limit in limits})
    found = {}
    for unit, amount in fields["estimate"].entries().items():
        if unit not in units:
            raise amount.error(f"no limit counts {unit!r}: the limits count {', '.join(units)}")
        most = min(limit.burst for limit in limits if limit.unit == unit)
        found[unit] = amount.integer(0, most)
    return found


def _endpoints(fields: Fields, provider: Provider) -> tuple[EndpointCost, ...]:
    if "endpoints" not in fields:
        return ()
    endpoints: list[EndpointCost] = []
    for entry in fields["endpoints"].items():
        parts = entry.fields("path", "methods", "cost")
        if "path" not in parts:
            raise entry.error("needs a path, such as {path: /v1/search/*, cost: 5}")
        path = parts["path"].string()
        if not path.startswith("/") or "?" in path or "*" in path.replace("/*", ""):
            expected = "a path that starts with / and has * only as an entire segment, such as /v1/*/history"
            raise parts["path"].error(f"expected {expected}, not {parts['path']}")
        methods = tuple(each.string().upper() for each in parts["methods"].one_or_many()) if "methods" in parts else ()
        endpoint = EndpointCost(path, methods, _cost(parts["cost"]) if "cost" in parts else 1)
        with entry.locate_errors(cost=parts.get("cost")):
            replace(provider, endpoints=(endpoint,))
        if (path, methods) in [known[:2] for known in endpoints]:
            raise parts["path"].error(f"{path} is listed twice")
        endpoints.append(endpoint)
    return tuple(endpoints)


def _cost(setting: ConfigValue) -> Cost:
    if setting.is_mapping:
        return {unit: amount.integer(0) for unit, amount in setting.entries().items()}
    return setting.integer(0)


def _text(fields: Fields, name: str) -> str | None:
    return fields[name].string() if name in fields else None


def _choice(fields: Fields, name: str, choices: tuple[str, ...], default: str) -> str:
    return fields[name].choice(*choices) if name in fields else default
