"""JSON schemas of provider and price files. They refuse what the readers refuse, as far as a schema can compare values.

A schema sees values as an editor's YAML parser reads them: `name: 5` is an integer there and a string for our reader,
`50_000` a string there and an integer for our reader. Both are accepted. `tests/cli/test_provider_schema.py` lists what
a schema cannot refuse.

A pool's members replace fields of the file. Fields of the file that every member replaces are checked, too.
"""

from __future__ import annotations

from typing import Any, Final, get_args

from tidegate._cli.period_patterns import (
    BARE,
    CALENDAR_PERIOD,
    FIXED_PERIOD,
    LIMIT_TEXT,
    MONEY_LIMIT_TEXT,
    any_case,
    whole,
)
from tidegate._policy.config_value import BOOLEANS
from tidegate._policy.model import OnStoreError
from tidegate._policy.units import MILLION
from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._bounds import MAX_INTEGER
from tidegate.outbound._providers.file import CALENDAR_FIELDS, HEADER_NAME, LIMIT_FIELDS, PROVIDER_FIELDS
from tidegate.outbound._providers.pool import MAX_MEMBERS, MAX_WEIGHT, CeilingScope, Pick
from tidegate.outbound._providers.pool_file import (
    KEY_FIELDS,
    LIMIT_SETTINGS,
    MEMBER_FIELDS,
    OTHER_FIELDS,
    POOL_FIELDS,
)
from tidegate.outbound._providers.prices import CALL_PRICES, PRICES_FIELDS, TOKEN_PRICES
from tidegate.outbound._providers.provider import Learn, QuotaScope

JsonSchema = dict[str, Any]

# Parts of the schema that several fields have.
LIMITS: Final[JsonSchema] = {"$ref": "#/$defs/limits"}
LIMIT_RULES: Final[JsonSchema] = {"$ref": "#/$defs/limit_rules"}
PRICES: Final[JsonSchema] = {"$ref": "#/$defs/prices"}

STRING: Final[JsonSchema] = {"type": ["string", "number", "boolean"], "minLength": 1}
STRINGS: Final[JsonSchema] = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
BOOLEAN: Final[JsonSchema] = {
    "anyOf": [
        {"type": "boolean"},
        {"pattern": whole("|".join(any_case(word) for word in BOOLEANS if word not in ("true", "false")))},
    ],
    "type": ["boolean", "string"],
}
DATE: Final = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])|\d{8}|\d{4}-?W\d{2}(?:-?[1-7])?"
LABEL: Final = r"[\w%\u0080-\uffff](?:[\w%\u0080-\uffff-]{0,61}[\w%\u0080-\uffff])?"
NUMERIC_END: Final = r"(?!(?:.*\.)?(?:0[xX][0-9a-fA-F]*|\d+)\.?$)"  # of a name; only an address has it
ADDRESS: Final = r"(?:\d{1,3}\.){3}\d{1,3}|\[?[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*\]?"
DOMAIN: Final = rf"{NUMERIC_END}(?:{LABEL}\.)*{LABEL}\.?|{ADDRESS}"
PATH: Final = r"(?=/)(?:/\*|[^*?])*"
URL: Final = r"[Hh][Tt][Tt][Pp][Ss]?://[^/?#@\\\s]+(?:/[^?#]*)?"
KEY_PRESET: Final = rf"\s*(?:bearer|header\s+{HEADER_NAME.pattern}|query\s+\S+)\s*"
CURRENCY_UNIT: Final[JsonSchema] = {"required": ["unit"], "properties": {"unit": {"pattern": whole("[a-z]{3}")}}}
MONEY_UNIT: Final[JsonSchema] = {
    "required": ["unit"],
    "properties": {"unit": {"pattern": whole("[a-z]{3}(?:_micros)?")}},
}


def pattern(expression: str, description: str = "") -> JsonSchema:
    """Describe a string."""
    found: JsonSchema = {"type": "string", "pattern": whole(expression)}
    return {**found, "description": description} if description else found


def integer(low: int, high: int | None = None) -> JsonSchema:
    """Describe an integer; one without an upper bound may have underscores, which YAML 1.2 reads as a string."""
    if high is not None:
        return {"type": "integer", "minimum": low, "maximum": high}
    digits = pattern(rf"(?=.*[{min(low, 1)}-9])\+?[0-9]+(?:_[0-9]+)+")
    return {"anyOf": [{"type": "integer", "minimum": low, "maximum": MAX_INTEGER}, digits]}


def amount(**low: float) -> JsonSchema:
    """Describe an amount of money with at most six decimals."""
    digits = pattern(r"[0-9]+(?:_[0-9]+)+(?:\.[0-9]{1,6}0*)?")
    return {"anyOf": [{"type": "number", "maximum": MAX_INTEGER // MILLION, **low}, digits]}


def closed(fields: dict[str, JsonSchema], **more: object) -> JsonSchema:
    """Describe an object that has only these fields."""
    return {"type": "object", "properties": fields, "additionalProperties": False, **more}


def has(*names: str) -> JsonSchema:
    """Describe an object that has all these fields."""
    return {"required": list(names)}


def has_any(*names: str) -> JsonSchema:
    """Describe an object that has at least one of these fields."""
    return {"anyOf": [has(name) for name in names]}


def without(*names: str) -> JsonSchema:
    """Describe an object that has none of these fields."""
    return {"properties": dict.fromkeys(names, False)}


def when(condition: JsonSchema, then: JsonSchema, otherwise: JsonSchema | None = None) -> JsonSchema:
    """Describe an object that fits a schema if it fits a condition, and another one if not."""
    return {"if": condition, "then": then, "else": otherwise or {}}


def one_or_many(described: JsonSchema, **more: object) -> JsonSchema:
    """Describe a value, or a list of such values."""
    return {"anyOf": [described, {"type": "array", "items": described, **more}]}


def mapping(values: JsonSchema, **more: object) -> JsonSchema:
    """Describe an object with any names."""
    return {"type": "object", "additionalProperties": values, **more}


# ---- limits ----------------------------------------------------------------------------------------------------------

COUNT: Final = integer(0)
QUOTA: Final = integer(1)
PERIOD: Final = pattern(rf"{FIXED_PERIOD}|{CALENDAR_PERIOD}", "30s, 5m, 1h, 1d, …; day, week, month, year")
LENGTH: Final = pattern(FIXED_PERIOD, "30s, 5m, 1h, …")
LIMIT_VALUES: Final[dict[str, JsonSchema]] = {
    "limit": amount(exclusiveMinimum=0),
    "period": PERIOD,
    "unit": STRING,
    "algorithm": {"enum": list(ALGORITHMS)},
    "burst": COUNT,
    "timezone": STRING,
    "reset_day": integer(1, 31),
    "reset_hour": integer(0, 23),
}


def has_period(expression: str) -> JsonSchema:
    """Describe an object whose period fits a regular expression."""
    return {"properties": {"period": {"pattern": whole(expression)}}}


def has_named_period(*names: str) -> JsonSchema:
    """Describe an object with one of these calendar periods."""
    shorts = [rf"1{any_case(name[0])}" for name in names if name != "month"]
    return {"required": ["period"], **has_period("|".join((*map(any_case, names), *shorts)))}


def limit_rules() -> JsonSchema:
    """Describe which values of a limit fit together: periods, algorithms, reset days and hours, decimals."""
    is_calendar = {
        "anyOf": [
            {"required": ["algorithm"], "properties": {"algorithm": {"const": "calendar_window"}}},
            {"allOf": [{"not": has("algorithm")}, has_any(*CALENDAR_FIELDS)]},
        ]
    }
    defaults = {"timezone": {"const": "UTC"}, "reset_day": {"const": 1}, "reset_hour": {"const": 0}}
    fixed = {"properties": {**defaults, "period": LENGTH}}
    other = when(has("algorithm"), fixed, has_period(rf"{FIXED_PERIOD}|{BARE}"))
    first_day = {"properties": {"reset_day": {"const": 1}}}
    rules = [
        {"required": ["limit", "period"]},
        when(CURRENCY_UNIT, {}, {"properties": {"limit": QUOTA}}),
        when(is_calendar, has_period(CALENDAR_PERIOD), other),
        when(has_named_period("minute", "hour", "day"), first_day),
        when(has_named_period("minute", "hour"), {"properties": {"reset_hour": {"const": 0}}}),
        when(has_named_period("week"), {"properties": {"reset_day": {"maximum": 7}}}),
    ]
    return {"allOf": rules}


def limit_object(own: dict[str, JsonSchema] | None = None, *rules: JsonSchema) -> JsonSchema:
    """Describe a limit as an object; `own` are more of its fields."""
    return closed({**LIMIT_VALUES, "name": STRING, **(own or {})}, allOf=[LIMIT_RULES, *rules])


def limits_schema() -> JsonSchema:
    """Describe one limit or several."""
    text = pattern(LIMIT_TEXT, "60/1m, 500/1d fixed_window, 90_000/1m unit=tokens, …")
    return one_or_many({"anyOf": [text, limit_object()]}, minItems=1)


def spend_schema() -> JsonSchema:
    """Describe one ceiling of money or several."""
    scope: JsonSchema = {"enum": list(get_args(CeilingScope))}
    text = pattern(MONEY_LIMIT_TEXT, "25/day unit=usd")
    return one_or_many({"anyOf": [text, limit_object({"per": one_or_many(scope)}, MONEY_UNIT)]})


def has_limits() -> JsonSchema:
    """Describe an object that has a limit of its own."""
    no_limit = without("limit", "period")
    all_models = {"properties": {"models": {"required": ["*"]}}}
    return {
        "anyOf": [
            has("limits"),
            has("limit", "period"),
            {"allOf": [has("concurrency"), no_limit]},
            {"allOf": [has("models"), all_models, no_limit]},
        ]
    }


def limit_setting_rules() -> list[JsonSchema]:
    """Describe which fields of a file, or of a member, with limits can be combined."""
    alone = [name for name in LIMIT_FIELDS if name != "algorithm"]
    return [
        when(has("limits"), without(*alone), when(has_any("limit", "period"), LIMIT_RULES)),
        when(has("api_key_file"), without("api_key")),
    ]


# ---- the file --------------------------------------------------------------------------------------------------------


def key_schema() -> JsonSchema:
    """Describe where the key is sent."""
    own = {"header": pattern(HEADER_NAME.pattern), "query": STRING, "prefix": STRING, "plain_http": BOOLEAN}
    rules = {"oneOf": [has("header"), has("query")], "dependentRequired": {"prefix": ["header"]}}
    return {"anyOf": [pattern(KEY_PRESET, "bearer, header NAME or query NAME"), closed(own, **rules)]}


def shared_values() -> dict[str, JsonSchema]:
    """Describe the fields that a file and a member of its pool have."""
    key_text = {"type": ["string", "number", "boolean", "null"], "minLength": 1}
    return {
        **LIMIT_VALUES,
        "limits": LIMITS,
        "concurrency": {"anyOf": [QUOTA, closed({"limit": QUOTA, "lease": LENGTH}, required=["limit"])]},
        "models": mapping(LIMITS, minProperties=1),
        "api_key": {**key_text, "description": "the key, or ${NAME} for an environment variable"},
        "api_key_file": {**STRING, "description": "a file that contains the key"},
        "key": key_schema(),
        "price": {"anyOf": [STRING, PRICES]},
        "profile": STRING,
    }


def pool_schema() -> JsonSchema:
    """Describe a pool."""
    values = {
        **shared_values(),
        "name": STRING,
        "weight": integer(1, MAX_WEIGHT),
        "order": COUNT,
        "drain": BOOLEAN,
        "url": pattern(URL, "https://eu.example.com/v1"),
    }
    fields = (*MEMBER_FIELDS, *KEY_FIELDS, *LIMIT_SETTINGS, *OTHER_FIELDS)
    rules = [when(has_any(*LIMIT_SETTINGS), has_limits()), *limit_setting_rules()]
    member = closed({name: values[name] for name in fields}, required=["name"], allOf=rules)
    own: dict[str, JsonSchema] = {
        "pick": {"enum": list(get_args(Pick))},
        "sticky": STRING,
        "members": {"type": "array", "items": member, "minItems": 1, "maxItems": MAX_MEMBERS},
    }
    return closed({name: own[name] for name in POOL_FIELDS}, required=["members"])


def each_member(described: JsonSchema) -> JsonSchema:
    """Describe a file with a pool whose members all fit a schema."""
    members = {"properties": {"members": {"items": described}}}
    return {"required": ["pool"], "properties": {"pool": members}}


def file_rules() -> list[JsonSchema]:
    """Describe which fields of a file can be combined; what a file lacks, each member of its pool may have."""
    has_key = {"anyOf": [{**has("api_key"), "properties": {"api_key": {"not": {"type": "null"}}}}, has("api_key_file")]}
    has_price = {"anyOf": [has("price"), each_member(has("price"))]}
    by_price = {
        "required": ["pool"],
        "properties": {"pool": {**has("pick"), "properties": {"pick": {"const": "price"}}}},
    }
    tokens_only = {"properties": {"unbounded": mapping(mapping({}, propertyNames={"const": "tokens"}))}}
    keyless = {"allOf": [without("key"), when(has("pool"), each_member(when(has("key"), has_key)))]}
    return [
        *limit_setting_rules(),
        {"anyOf": [has_limits(), each_member(has_any(*LIMIT_SETTINGS))]},
        {"anyOf": [has_key, each_member(has_key), keyless]},
        when(has("spend"), has_price),
        when(by_price, has_price),
        {"anyOf": [has_any("price", "pool"), tokens_only]},
    ]


def provider_object() -> JsonSchema:
    """Describe a provider file."""
    scope: JsonSchema = {"enum": list(get_args(QuotaScope))}
    endpoint = {"path": pattern(PATH), "methods": STRINGS, "cost": {"anyOf": [COUNT, mapping(COUNT)]}}
    values: dict[str, JsonSchema] = {
        **shared_values(),
        "domain": pattern(DOMAIN, "the host; also matches its subdomains"),
        "name": STRING,
        "spend": spend_schema(),
        "pool": pool_schema(),
        "endpoints": {"type": "array", "items": closed(endpoint, required=["path"])},
        "per": one_or_many(scope),
        "learn": {"enum": list(get_args(Learn))},
        "on_store_error": {"enum": list(get_args(OnStoreError))},
        "retries": {"anyOf": [integer(0, 10), closed({"max": integer(0, 10), "within": LENGTH})]},
        "estimate": mapping(COUNT),
        "aliases": mapping(STRING),
        "output_reserve": pattern("maximum|p[1-9][0-9]?", "p95, or maximum"),
        "strict": BOOLEAN,
        "unbounded": mapping(mapping(COUNT, minProperties=1, propertyNames=pattern("tokens|[a-z]{3}_micros"))),
    }
    fields = {name: values[name] for name in (*LIMIT_FIELDS, *PROVIDER_FIELDS)}
    shared = {"limits": limits_schema(), "limit_rules": limit_rules(), "prices": prices_object()}
    return closed(fields, required=["domain"], allOf=file_rules(), **{"$defs": shared})


def prices_object() -> JsonSchema:
    """Describe a file of prices, or the field `price` of a provider."""
    both = {name: ["input", "output"] for name in TOKEN_PRICES}
    fields = {name: amount(minimum=0) for name in (*TOKEN_PRICES, *CALL_PRICES)} | {"kinds": mapping(amount(minimum=0))}
    price = closed(fields, minProperties=1, dependentRequired=both)
    when_valid = "when the prices were valid, such as 2026-11-01"
    own: dict[str, JsonSchema] = {
        "date": {"type": ["string", "integer"], "pattern": whole(DATE), "description": when_valid},
        "currency": pattern("[a-z]{3}"),
        "models": mapping(price),
        "default": price,
    }
    has_models = {**has("models"), "properties": {"models": {"minProperties": 1}}}
    rules = {"anyOf": [has_models, has("default")]}
    return closed({name: own[name] for name in PRICES_FIELDS}, required=["date"], **rules)
