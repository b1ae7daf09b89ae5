"""Read a profile from YAML: one that is shipped (`openai`) or added by the user (by name, or `./mine.yaml`)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from tidegate._policy.config_value import ConfigValue, load
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.outbound._providers.profile import (
    TOKEN_UNITS,
    WHOLE_DOCUMENT,
    Charges,
    FailedCost,
    FieldPath,
    MediaEstimate,
    OutputCounted,
    Profile,
    ProfileEndpoint,
    RefusalRule,
    Unbounded,
    UsagePart,
)
from tidegate.outbound._providers.watched_files import YAML_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Fields = dict[str, ConfigValue]

NO_PROFILES: Final[Mapping[str, Path]] = MappingProxyType({})

SHIPPED_PROFILES: Final = Path(__file__).parent.parent / "_profiles"
DEFAULT_PROFILE: Final = "default"  # of providers whose file names none: the formats of OpenAI and Anthropic
PROFILE_FIELDS: Final = (
    "model",
    "output",
    "input",
    "usage",
    "counts",
    "output_rates",
    "charges",
    "output_counted",
    "failed",
    "stream",
    "refusals",
    "denial",
    "endpoints",
    "unbounded",
    "dropped",
    "domains",
)
USAGE_PARTS: Final = get_args(UsagePart)
APART: Final[tuple[str, ...]] = (
    "cache_apart",
    "reasoning_apart",
)  # whether the reported input and output do not include these
SUBTRACTED_PARTS: Final = ("-cache_read",)  # parts of the reported input that do not count
MODEL_PLACE: Final = "{model}"


def find_profile(setting: ConfigValue, added: Mapping[str, Path] = NO_PROFILES) -> Profile:
    """Read the profile that a provider file names: an added or a shipped one, or a path relative to that file."""
    text = setting.string()
    if "/" not in text and "\\" not in text and not text.endswith(YAML_SUFFIXES):
        if text in added:
            return read_profile(added[text])
        names = sorted({*shipped_names(), *added})
        if text not in names:
            known = f"expected {', '.join(names)} or a path such as ./mine.yaml"
            own = (
                "" if added else "; to use your own by name, give their folder: --profile, or Providers.load(profiles=)"
            )
            raise setting.error(f"there is no profile {setting}: {did_you_mean(text, names) or known + own}")
        return shipped_profile(text)
    path = Path(setting.file or "").parent / Path(text).expanduser()
    if not path.is_file():
        raise setting.error(f"cannot read {path}: there is no such file")
    return read_profile(path)


def profile_of_domain(domain: str, added: Mapping[str, Path] = NO_PROFILES) -> Profile | None:
    """Return the profile whose `domains` include a domain; an added one takes precedence; None if there is none."""
    profiles = (*map(read_profile, added.values()), *map(shipped_profile, shipped_names()))
    return next((each for each in profiles if any(is_domain_of(domain, known) for known in each.domains)), None)


def is_domain_of(domain: str, known: str) -> bool:
    """Return whether a domain is a known one or one of its subdomains; `*` in the known one is any label."""
    labels, wanted = domain.split("."), known.split(".")
    last = labels[-len(wanted) :]
    return len(last) == len(wanted) and all(map(fnmatchcase, last, wanted))


def find_profile_files(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the profiles that a user adds, by name: files, and the YAML files of directories."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError("there is no such file or directory", file=str(path), field="profiles")
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in entries:
            if file.suffix not in YAML_SUFFIXES or file.name.startswith("."):
                continue
            if file.stem in found and file.resolve() != found[file.stem].resolve():
                raise ConfigError(f"{found[file.stem]} has the same name: rename one of them", file=str(file))
            found[file.stem] = file
    return found


def shipped_names() -> list[str]:
    """Return the names of the profiles that are part of the package."""
    return sorted(path.stem for path in SHIPPED_PROFILES.glob("*.yaml") if path.stem != DEFAULT_PROFILE)


@lru_cache(maxsize=64)
def shipped_profile(name: str = DEFAULT_PROFILE) -> Profile:
    """Read a profile that is part of the package."""
    return read_profile(SHIPPED_PROFILES / f"{name}.yaml")


def read_profile(source: str | Path | Mapping[str, object]) -> Profile:
    """Read a profile from a file or a mapping."""
    section = load(source)
    fields = section.fields(*PROFILE_FIELDS)
    name = Path(section.file).stem if section.file else "profile"
    options: dict[str, Any] = {}
    sections = (
        ("model", _model),
        ("output", _output),
        ("input", _input),
        ("usage", _usage),
        ("denial", _denial),
        ("stream", _stream),
        ("unbounded", _unbounded),
    )
    for field, read in sections:
        if field in fields:
            options |= read(fields[field])
    if "counts" in fields:
        options["counts"] = _counts(fields["counts"], options)
    if "output_rates" in fields:
        options["output_rates"] = tuple(
            (model, rate.integer()) for model, rate in fields["output_rates"].entries().items()
        )
    for field, choices in (("charges", Charges), ("output_counted", OutputCounted), ("failed", FailedCost)):
        if field in fields:
            options[field] = fields[field].choice(*get_args(choices))
    entries: tuple[tuple[str, Callable[[ConfigValue], object]], ...] = (
        ("refusals", _refusal),
        ("endpoints", _endpoint),
    )
    for field, read_entry in entries:
        if field in fields:
            options[field] = tuple(read_entry(entry) for entry in fields[field].items())
    options |= _names(fields, "domains", "dropped")
    _check_media(fields, options)
    return Profile(name, **options, file=section.file)


def _names(fields: Fields, *wanted: str) -> dict[str, Any]:
    """Read fields that are lists of names, in any case."""
    given = {field: fields[field].one_or_many() for field in wanted if field in fields}
    return {field: tuple(entry.string().lower() for entry in entries) for field, entries in given.items()}


def _check_media(fields: Fields, options: dict[str, Any]) -> None:
    """Refuse an endpoint whose medium has no estimate."""
    media = options.get("media", {})
    for index, endpoint in enumerate(options.get("endpoints", ())):
        if endpoint.media and endpoint.media not in media:
            place = list(fields["endpoints"].items())[index]
            example = f"add {endpoint.media}: {{bytes_per_token: 1000}}, or similar"
            raise place.error(
                f"'input.media' has no entry {endpoint.media!r}: {did_you_mean(endpoint.media, media) or example}"
            )


def _model(setting: ConfigValue) -> dict[str, Any]:
    """Read `model: {body: [model], path: [/v1/models/{model}/*]}`."""
    fields = setting.fields("body", "path")
    paths = []
    for entry in fields["path"].one_or_many() if "path" in fields else ():
        text = entry.string()
        if text.count(MODEL_PLACE) != 1 or not text.startswith(("/", "*")):
            raise entry.error(f"expected a path with {MODEL_PLACE}, such as /models/{MODEL_PLACE}/*, not {entry}")
        before, after = (_path_pattern(part) for part in text.split(MODEL_PLACE))
        name = "[^/:]+" if after.startswith(":") else "[^/]+"  # Bedrock's models contain colons
        paths.append(f"{before}(?P<model>{name}){after}")
    return {
        "model_fields": _paths(fields, "body"),
        "model_paths": tuple(re.compile(each, re.IGNORECASE) for each in paths),
        "written_model_paths": tuple(map(re.compile, paths)),
    }


def _output(setting: ConfigValue) -> dict[str, Any]:
    """Read `output: {bounds: [max_tokens], times: [n], default: 1000}`."""
    fields = setting.fields("bounds", "times", "default")
    options: dict[str, Any] = {"bounds": _paths(fields, "bounds"), "times": _paths(fields, "times")}
    if "default" in fields:
        options["default_output"] = fields["default"].integer(0)
    return options


def _input(setting: ConfigValue) -> dict[str, Any]:
    """Read `input: {bytes_per_token: 4, tools: 346, media: {image_url: {tokens: 1105}}}`."""
    fields = setting.fields("bytes_per_token", "tools", "media")
    options: dict[str, Any] = {}
    if "bytes_per_token" in fields:
        options["bytes_per_token"] = fields["bytes_per_token"].integer(1, 100)
    if "tools" in fields:
        options["tools"] = fields["tools"].integer(0)
    if "media" in fields:
        options["media"] = {key: _media(entry) for key, entry in fields["media"].entries().items()}
    return options


def _media(setting: ConfigValue) -> MediaEstimate:
    fields = setting.fields("tokens", "bytes_per_token", "minimum")
    if ("tokens" in fields) == ("bytes_per_token" in fields):
        raise setting.error(
            "expected either tokens or bytes_per_token, such as {tokens: 1105} or {bytes_per_token: 25}"
        )
    return MediaEstimate(**{name: value.integer() for name, value in fields.items()})


def _usage(setting: ConfigValue) -> dict[str, Any]:
    """Read `usage: {at: [usage], input: [prompt_tokens], output: [completion_tokens], cache_apart: no}`."""
    fields = setting.fields("at", *USAGE_PARTS, *APART)
    if "at" not in fields:
        raise setting.error("needs at, the field of a response that contains the usage, such as at: [usage]")
    parts = {
        part: tuple(entry.string() for entry in fields[part].one_or_many()) for part in USAGE_PARTS if part in fields
    }
    at = tuple(WHOLE_DOCUMENT if entry.string() == "$" else _path(entry) for entry in fields["at"].one_or_many())
    if "cache_write" in parts and "cache_apart" not in fields:
        message = (
            "needs cache_apart: yes if the reported input does not include what a cache has read or written, or no"
        )
        raise setting.error(message)
    apart: dict[str, Any] = {name: fields[name].boolean() for name in APART if name in fields}
    return {"usage_at": at, "usage": parts, **apart}


def _stream(setting: ConfigValue) -> dict[str, Any]:
    """Read `stream: {text: [content], repeats: ["*.done"], ends: ["data: [DONE]"]}`."""
    fields = setting.fields("text", "repeats", "ends")
    texts = {name: [each.string() for each in value.one_or_many()] for name, value in fields.items()}
    ends = tuple(line.encode() for line in texts.get("ends", ()))
    repeats = "|".join(map(_path_pattern, texts.get("repeats", ())))
    return {
        "stream_fields": frozenset(texts.get("text", ())),
        "stream_repeats": re.compile(repeats) if repeats else None,
        "stream_ends": ends,
    }


def _counts(setting: ConfigValue, options: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Read `counts: {tokens: [input, -cache_read, output]}`: which parts of the usage count towards a unit."""
    found = {}
    usage = options.get("usage", {})
    for unit, parts in setting.fields(*TOKEN_UNITS).items():
        names = []
        for entry in parts.one_or_many():
            names.append(entry.choice(*USAGE_PARTS, *SUBTRACTED_PARTS))
            part = names[-1].removeprefix("-")
            if part not in usage:
                raise entry.error(f"'usage' does not say where {part} is reported: add usage.{part}")
            if part == "reasoning" and not options.get("reasoning_apart"):
                message = (
                    "the output includes reasoning: leave it out, or add usage.reasoning_apart: yes if it does not"
                )
                raise entry.error(message)
        found[unit] = tuple(names)
    return found


def _refusal(setting: ConfigValue) -> RefusalRule:
    """Read `{field: error.message, retry_after: "try again in ([0-9.]+m?s)"}`."""
    fields = setting.fields("field", "retry_after", "quota")
    if "field" not in fields or ("retry_after" in fields) == ("quota" in fields):
        raise setting.error("expected a field, and either retry_after or quota with a regular expression")
    says = "quota" if "quota" in fields else "retry_after"
    text = fields[says].string()
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise fields[says].error(f"expected a regular expression, not {text!r}: {error}") from None
    needed = {"retry_after"} if says == "retry_after" else {"unit", "period"}
    if not needed <= pattern.groupindex.keys():
        names = " and ".join(f"(?P<{name}>…)" for name in sorted(needed))
        raise fields[says].error(f"needs the group {names}" if len(needed) == 1 else f"needs the groups {names}")
    return RefusalRule(_path(fields["field"]), pattern, cast("Any", says))


def _denial(setting: ConfigValue) -> dict[str, Any]:
    """Read `denial: {error: {message: "{message}"}}`."""
    return {"denial": _document(setting)}


def _document(setting: ConfigValue) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON document: mappings, lists, integers, null and strings."""
    if setting.is_mapping:
        return {name: _document(each) for name, each in setting.entries().items()}
    if setting.is_list:
        return [_document(each) for each in setting.items()]
    if setting.is_null:
        return None
    try:
        return setting.integer(0)
    except ConfigError:
        return setting.string()


def _kind(setting: ConfigValue | None) -> tuple[str, FieldPath]:
    """Read `priced: search`, or `{image: n}`: the field that says how many are requested."""
    if setting is None:
        return "", ()
    if not setting.is_mapping:
        return setting.string(), ()
    entries = setting.entries()
    if len(entries) != 1:
        raise setting.error("expected one kind and the field with its number, such as {image: n}")
    ((kind, field),) = entries.items()
    return kind, _path(field)


def _endpoint(setting: ConfigValue) -> ProfileEndpoint:
    """Read `{path: /v1/embeddings, output: no}`."""
    fields = setting.fields("path", "output", "counted", "bound", "priced", "streams", "media")
    if "path" not in fields:
        raise setting.error("needs a path, such as {path: /v1/embeddings, output: no}")
    path = fields["path"].string()
    if not path.startswith(("/", "*")):
        raise fields["path"].error(f"expected a path that starts with / or *, not {fields['path']}")
    return ProfileEndpoint(
        re.compile(_path_pattern(path)),
        fields["output"].boolean() if "output" in fields else True,
        fields["counted"].boolean() if "counted" in fields else True,
        _path(fields["bound"]) if "bound" in fields else (),
        *_kind(fields.get("priced")),
        fields["streams"].string() if "streams" in fields else None,
        fields["media"].string() if "media" in fields else "",
    )


def _unbounded(setting: ConfigValue) -> dict[str, Any]:
    """Read `unbounded: {fields: [conversation], anywhere: [file_id], paths: {batches: "*/batches"}}`."""
    fields = setting.fields("fields", "anywhere", "tools", "paths", "unreported")
    texts = {
        name: tuple(each.string() for each in fields[name].one_or_many())
        for name in ("anywhere", "tools")
        if name in fields
    }
    paths = []
    for name, entry in (fields["paths"].entries() if "paths" in fields else {}).items():
        for each in entry.one_or_many():
            if not each.string().startswith(("/", "*")):
                raise each.error(f"expected a path that starts with / or *, not {each}")
            paths.append((name, re.compile(_path_pattern(each.string()), re.IGNORECASE)))
    anywhere, unreported = frozenset(texts.get("anywhere", ())), _paths(fields, "unreported")
    found = Unbounded(
        _paths(fields, "fields"),
        anywhere,
        texts.get("tools"),
        tuple(paths),
        unreported,
        _finder({*anywhere, "id"}) if anywhere else None,  # an item with nothing but an `id` refers to a stored one
        _finder({path[0] for path in unreported}) if unreported else None,
    )
    return {"unbounded": found}


def _finder(names: Iterable[str]) -> re.Pattern[bytes]:
    """Return a pattern that finds these strings in a JSON body."""
    return re.compile(b'"(?:' + b"|".join(re.escape(name.encode()) for name in sorted(names)) + b')"')


def _path_pattern(path: str) -> str:
    """Return a path as a regular expression; `*` matches everything."""
    return ".*".join(map(re.escape, path.split("*")))


def _paths(fields: Fields, name: str) -> tuple[FieldPath, ...]:
    return tuple(_path(entry) for entry in fields[name].one_or_many()) if name in fields else ()


def _path(setting: ConfigValue) -> FieldPath:
    """Read the place of a value in a JSON document, such as `generationConfig.maxOutputTokens`."""
    keys = tuple(setting.string().split("."))
    if not all(keys):
        raise setting.error(f"expected field names separated by dots, such as usage.input_tokens, not {setting}")
    return keys
