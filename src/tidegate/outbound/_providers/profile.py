"""A Profile: how a provider of language models counts tokens. Data, read from YAML by `profile_file`.

model       where a request names its model: fields of the body, patterns of the path
output      which fields bound the length of the output, and how many outputs are requested
input       how the input is estimated: text, images, audio, files, tools
usage       where a response reports what was used
stream      which fields of an event are part of the output, and which lines end it
counts      which parts of the usage count towards which unit
charges     whether the provider charges the usage, the bound at the start, or its own estimate
refusals    what the body of a 429 says
denial      the body of a 429 that a gateway sends in place of the provider
endpoints   paths with other rules: no output (embeddings), or not counted at all (batches)
unbounded   what a request uses although it is not in the request: stored conversations, files, tools of the provider
dropped     query parameters and header fields that a gateway does not pass on, because they hide the usage
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Mapping

# `usage`: an estimate is reserved, the usage replaces it. `bound`: input and bound count from the start, the usage
# replaces them at the end. `estimate`: input and bound count, whatever the output took.
Charges = Literal["usage", "bound", "estimate"]
FailedCost = Literal["free", "input", "estimate"]  # what a call costs that fails without reporting usage
OutputCounted = Literal["start", "produced"]  # when the provider counts output: with the request, or as it is produced
UsagePart = Literal["input", "cache_read", "cache_write", "output", "reasoning", "audio", "audio_output", "total"]
FieldPath = tuple[str, ...]  # the keys that lead to a value of a JSON document; `*` is every entry of a list
WHOLE_DOCUMENT: Final[FieldPath] = ()

WEBSOCKET: Final = "websocket"  # the name of a connection whose messages are not counted
TOKEN_UNITS: Final = ("tokens", "input-tokens", "output-tokens")
MAX_PATHS: Final = 1024  # paths of requests that are remembered
MAX_VALUES: Final = 1000  # values of a JSON document that one path is followed to
SLASHES = re.compile("/{2,}")
SPECIAL_OF_FNMATCH = re.compile(r"[\[?]")  # apart from `*`; in brackets, they stand for themselves


class MediaEstimate(NamedTuple):
    """The estimated tokens of an image, an audio recording or a file: a fixed number, or by its length in bytes."""

    tokens: int = 0
    bytes_per_token: int = 0
    minimum: int = 0

    def estimate(self, length: int) -> int:
        """Estimate the tokens of a medium that takes this number of bytes in the request."""
        return max(self.minimum, self.tokens, -(-length // self.bytes_per_token) if self.bytes_per_token else 0)


class RefusalRule(NamedTuple):
    """What a field of a 429's body says: how long to wait, or which quota is used up."""

    field: FieldPath
    pattern: re.Pattern[str]
    says: Literal["retry_after", "quota"]


class ProfileEndpoint(NamedTuple):
    """Paths that are counted differently: `has_output` is False for embeddings, `counted` is False for batches."""

    pattern: re.Pattern[str]
    has_output: bool = True
    counted: bool = True
    bound: FieldPath = ()  # the field that bounds the output, if a request sets none
    kind: str = ""  # of calls that have a price of their own, such as `image`
    amount: FieldPath = ()  # the field that says how many of these are requested; else one
    streams: str | None = None  # the query with which every output is streamed as events, such as `alt=sse`
    media: str = ""  # what a body that is not JSON contains, such as the audio file of a form


ANY_ENDPOINT: Final = ProfileEndpoint(re.compile(""))


class Unbounded(NamedTuple):
    """What a request uses although it is not in the request, so that its length bounds nothing.

    `fields` are places of a request, `anywhere` keys and types wherever they are. `tools` are the types (or keys) of
    tools that the program runs itself; the provider runs all others. `paths` are requests whose response does not
    report what they use, such as batches; with the fields of `unreported`, it is the same.
    """

    fields: tuple[FieldPath, ...] = ()
    anywhere: frozenset[str] = frozenset()
    tools: tuple[str, ...] | None = None
    paths: tuple[tuple[str, re.Pattern[str]], ...] = ()
    unreported: tuple[FieldPath, ...] = ()
    pattern: re.Pattern[bytes] | None = None  # finds `anywhere` in a body
    unreported_pattern: re.Pattern[bytes] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names under which a provider file gives a cost, apart from those of tools."""
        fields = {".".join(path) for path in (*self.fields, *self.unreported)}
        return frozenset(fields | self.anywhere | {name for name, _ in self.paths})


NOTHING_UNBOUNDED: Final = Unbounded()


class PathReading(NamedTuple):
    """What a path says: how its requests are counted, and which model it names.

    There are several `models` if a provider may read the path in several ways. `as_written`: it names its model in the
    usual spelling, so the body does not. `unbounded` names requests whose response does not report their usage.
    """

    endpoint: ProfileEndpoint
    models: tuple[str, ...]
    as_written: bool
    unbounded: str


def spellings_of(path: str) -> tuple[str, ...]:
    """Return a path as it is written, and as servers may read it: slashes joined, characters decoded."""
    joined = SLASHES.sub("/", path)
    decoded = SLASHES.sub("/", unquote(unquote(joined)).replace("\\", "/"))
    return tuple(dict.fromkeys((path, joined, joined.rstrip("/") or "/", decoded, decoded.rstrip("/") or "/")))


@dataclass(frozen=True, slots=True)
class Profile:
    """How a provider counts. Immutable; see the module for its parts."""

    name: str
    model_fields: tuple[FieldPath, ...] = ()
    model_paths: tuple[re.Pattern[str], ...] = ()  # in any case
    written_model_paths: tuple[re.Pattern[str], ...] = ()  # the same, in the usual spelling
    bounds: tuple[FieldPath, ...] = ()
    times: tuple[FieldPath, ...] = ()
    default_output: int = 1000
    bytes_per_token: int = 4
    tools: int = 0
    media: Mapping[str, MediaEstimate] = field(default_factory=dict)
    usage_at: tuple[FieldPath, ...] = ()
    usage: Mapping[UsagePart, tuple[str, ...]] = field(default_factory=dict)
    cache_apart: bool = False  # whether the input that is reported does not include what a cache has read or written
    reasoning_apart: bool = False  # whether the output that is reported does not include reasoning
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # parts; `-cache_read` is subtracted
    output_rates: tuple[tuple[str, int], ...] = ()
    charges: Charges = "usage"
    output_counted: OutputCounted = "start"
    failed: FailedCost = "free"
    stream_fields: frozenset[str] = frozenset()
    stream_repeats: re.Pattern[str] | None = None  # types of events whose text has arrived before
    stream_ends: tuple[bytes, ...] = ()
    refusals: tuple[RefusalRule, ...] = ()
    denial: Any = None  # a JSON document with {message}, {seconds} in its strings
    endpoints: tuple[ProfileEndpoint, ...] = ()
    unbounded: Unbounded = NOTHING_UNBOUNDED
    dropped: tuple[str, ...] = ()  # query parameters and header fields that hide the usage, or change the method
    domains: tuple[str, ...] = ()  # whose providers use it if their file names none; `*` is one label
    file: str | None = field(default=None, compare=False)
    media_pattern: re.Pattern[bytes] | None = field(init=False, repr=False, compare=False)  # finds media in a body
    usage_markers: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    # `counts` with the sign of each part
    signed_counts: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = field(init=False, repr=False, compare=False)
    # what counts towards each unit before the output is known: the unit, whether input does, whether output does
    estimated_units: tuple[tuple[str, bool, bool], ...] = field(init=False, repr=False, compare=False)
    _paths: dict[str, PathReading] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare what is searched for in bodies."""
        names = b"|".join(re.escape(name.encode()) for name in self.media)
        object.__setattr__(self, "media_pattern", re.compile(b'"(?:' + names + b')"') if names else None)
        object.__setattr__(self, "usage_markers", tuple({path[-1].encode() for path in self.usage_at if path}))
        units = tuple((unit, "input" in parts, "output" in parts) for unit, parts in self.counts.items())
        object.__setattr__(self, "estimated_units", units)
        signed = tuple(
            (unit, tuple((part.removeprefix("-"), -1 if part[0] == "-" else 1) for part in parts))
            for unit, parts in self.counts.items()
        )
        object.__setattr__(self, "signed_counts", signed)

    def read_path(self, path: str) -> PathReading:
        """Return how the requests of a path are counted, and the model that it names."""
        found = self._paths.get(path)
        if found is None:
            if len(self._paths) >= MAX_PATHS:
                self._paths.clear()
            found = self._paths[path] = self._read_path(path)
        return found

    def _read_path(self, path: str) -> PathReading:
        """Read a path as it is written and as a provider may read it; the dearest reading counts."""
        spellings = spellings_of(path)
        endpoints = [
            next((each for each in self.endpoints if each.pattern.fullmatch(spelling)), ANY_ENDPOINT)
            for spelling in spellings
        ]
        endpoint = max(reversed(endpoints), key=lambda each: (each.counted, each.has_output, bool(each.bound)))
        names = (pattern.fullmatch(spelling) for spelling in spellings for pattern in self.model_paths)
        models = tuple(dict.fromkeys(unquote(each["model"]) for each in names if each is not None))
        as_written = bool(models) and any(pattern.fullmatch(path) for pattern in self.written_model_paths)
        hidden = (
            name
            for name, pattern in self.unbounded.paths
            if any(pattern.fullmatch(spelling.rstrip("/")) for spelling in spellings)
        )
        return PathReading(endpoint, models, as_written, next(hidden, ""))

    def output_rate(self, model: str | None) -> int:
        """Return how many tokens of the quota each token of the output uses."""
        for pattern, rate in self.output_rates:
            if matches_model(pattern, model or ""):
                return rate
        return 1


@lru_cache(maxsize=4096)
def matches_model(pattern: str, model: str) -> bool:
    """Return whether a model matches a pattern such as `gpt-*`, in any case: some providers accept any.

    Only `*` is special, unlike in `fnmatch`.
    """
    return _model_pattern(pattern).fullmatch(model) is not None


@lru_cache(maxsize=1024)
def _model_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(SPECIAL_OF_FNMATCH.sub(r"[\g<0>]", pattern)), re.IGNORECASE)


def values_at(document: Any, path: FieldPath) -> list[Any]:  # noqa: ANN401 - any JSON value
    """Return the values of a JSON document that a path leads to: usually one, or none."""
    if len(path) == 1 and isinstance(document, dict) and path[0] != "*":
        return [document[path[0]]] if path[0] in document else []
    found = [document]
    for key in path:
        following: list[Any] = []
        for each in found:
            if key == "*" and isinstance(each, list):
                following += each[:MAX_VALUES]
            elif isinstance(each, dict) and key in each:
                following.append(each[key])
        found = following[:MAX_VALUES]
    return found
