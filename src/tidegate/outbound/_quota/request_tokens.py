"""What a request to a language model asks for, as its provider's profile describes it.

Requests may contain anything: what is not understood is estimated by its length, and nothing raises.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from tidegate.core._bounds import MAX_INTEGER
from tidegate.outbound._providers.profile import FieldPath, Profile, ProfileEndpoint, values_at
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.form_body import read_number
from tidegate.outbound._quota.json_body import read_json
from tidegate.outbound._quota.unbounded import CONTAINERS, SOURCE, find_unbounded, is_unreported, may_contain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tidegate.core import Limit
    from tidegate.outbound._providers.prices import ModelPrice

    Tokenizer = Callable[[str], int | None]

MAX_MODEL_LENGTH: Final = 200  # characters of a model's name that are used
MAX_DEPTH: Final = 50  # levels of a request that are searched for media
MAX_COUNT_DIGITS: Final = 15  # of a number of tokens that is written as a string
TOOL_FIELDS: Final = ("tools", "toolConfig", "functions")  # contain schemas: a property called `image` is not an image
# What counts as a medium: data and addresses in its own field. A text is billed as one, wherever it is.
URL_SUFFIX: Final = "_url"
DATA_FIELDS: Final = ("data", "bytes", "file_data")
MEDIA_FIELDS: Final = (*DATA_FIELDS, "url", "uri", "fileUri", "file_uri")
MEDIA_TYPES: Final = ("mimeType", "mime_type", "media_type")
MEDIA_TYPE: Final = re.compile(
    r"(?:image|audio|video)/|application/(?:pdf|octet-stream|zip|msword|vnd\.)", re.IGNORECASE
)
ADDRESS: Final = re.compile(rf"https?://|(?=data:(?:{MEDIA_TYPE.pattern}))[^,\s]{{1,200}};base64,", re.IGNORECASE)
BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_"


class RequestTokens(NamedTuple):
    """What a request asks for.

    `text_length` is its length in bytes without media, `fixed` the estimated tokens of media and tools. `bound` is how
    long one output may become, `stated` whether the request says so (else it is the profile's default), `times` is how
    many outputs it requests. `price` is that of its model, if the provider has prices; `amount` is how many images, or
    others of the kind of its endpoint, it requests. `streams` is whether the output is streamed as events.
    `other_models` are further readings of its path. `unbounded` names what it uses that is not in it and has no cost;
    `unreported` is whether its response does not report its usage, `hidden` the name of a path or connection of that
    kind. `given_tokens` and `given_money` are what the provider file says that these cost. `readable` is whether its
    body was understood.
    """

    profile: Profile
    endpoint: ProfileEndpoint
    model: str | None
    document: dict[str, Any]
    text_length: int
    fixed: int
    bound: int
    stated: bool
    times: int
    price: ModelPrice | None = None
    amount: int = 0
    streams: bool = False
    other_models: tuple[str, ...] = ()
    unbounded: tuple[str, ...] = ()
    unreported: bool = False
    hidden: str = ""
    given_tokens: int = 0
    given_money: int = 0
    readable: bool = True

    @property
    def longest(self) -> int:
        """The most tokens that one output may take: without a bound in the request, nothing limits it."""
        return self.bound if self.stated else MAX_INTEGER

    @property
    def bound_name(self) -> str:
        """The name of the field that bounds the output."""
        return ".".join(self.endpoint.bound or self.profile.bounds[0])

    @property
    def fee(self) -> int:
        """What the request costs apart from its tokens, in micros."""
        return (
            0
            if self.price is None
            else min(MAX_INTEGER, self.price.fee(self.endpoint.kind, self.amount) + self.given_money)
        )

    def estimate_input(self, learned: int | None = None, tokenizer: Tokenizer | None = None) -> int:
        """Estimate the tokens of the input: by the tokenizer, by what was learned, or by its length."""
        if not self.endpoint.counted:
            return self.given_tokens
        if tokenizer is not None and self.document:
            texts, numbers = _texts(self.document, self.profile)
            counted = tokenizer("\n".join(texts))
            if counted is not None:
                return self.fixed + numbers + counted
        return self.fixed + (-(-self.text_length // self.profile.bytes_per_token) if learned is None else learned)

    @property
    def largest_input(self) -> int:
        """The most tokens that the input may take, apart from media: a token has at least one byte."""
        return self.fixed + self.text_length if self.endpoint.counted else self.given_tokens

    def with_form(self, form: bytes) -> RequestTokens:
        """Return the request with the number of images, or others of its kind, that a form asks for."""
        return self._replace(amount=max(1, _stated_count(read_number(form, self.endpoint.amount[-1])) or 1))

    @property
    def can_be_clamped(self) -> bool:
        """Whether its body can be changed to have another bound."""
        return bool(self.document) and bool(self.endpoint.bound or self.profile.bounds)

    def clamped(self, output_tokens: int) -> bytes:
        """Return the body with every bound lowered to `output_tokens`."""
        bounds = self.profile.bounds
        fallback = self.endpoint.bound or bounds[0]
        document, bounded = self.document, False
        for path in bounds:
            values = [value for value in values_at(document, path) if value is not None]
            if values and not all(is_count(value) and value <= output_tokens for value in values):
                document, bounded = _with_value(document, path, output_tokens), True
        if not self.stated and not bounded:
            document = _with_value(document, fallback, output_tokens)
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def read_request(profile: Profile, url: str, body: bytes | None) -> RequestTokens:
    """Read what a request asks for."""
    endpoint, models, as_written, hidden = profile.read_path(path_of(url))
    document = read_json(body) if body else {}
    if not as_written and (named := _model_of(document, profile.model_fields)) is not None:
        models = (*models, named)
    bound, times = _largest_at(document, profile.bounds), _largest_at(document, profile.times) or 1
    stated = bound is not None
    if bound is None:
        bound = profile.default_output
    amount = (
        max(1, (_largest_at(document, (endpoint.amount,)) if endpoint.amount else None) or 1) if endpoint.kind else 0
    )
    if not endpoint.has_output or not endpoint.counted:
        bound, times, stated = 0, 1, True
    length, fixed = len(body or b""), 0
    if body and endpoint.media and not document:  # a form with a file
        length, fixed = 0, profile.media[endpoint.media].estimate(length)
    elif body and profile.media_pattern is not None and may_contain(profile.media_pattern, body):
        media_length, fixed = _media(document, profile)
        length = max(0, length - media_length)
    if profile.tools and document.get("tools" if "tools" in document else "toolConfig"):
        fixed += profile.tools
    names = [model[:MAX_MODEL_LENGTH] for model in models]
    name = names[0] if names else None
    streams = document.get("stream") is True or (endpoint.streams is not None and endpoint.streams in _query(url))
    found = RequestTokens(profile, endpoint, name, document, length, fixed, bound, stated, times, None, amount, streams)
    if len(names) > 1:
        found = found._replace(other_models=tuple(names[1:]))
    unbounded = find_unbounded(profile, document, body) if body and document else ()
    if hidden or unbounded:
        found = found._replace(
            unbounded=(hidden, *unbounded) if hidden else unbounded,
            unreported=bool(hidden) or is_unreported(profile, document),
            hidden=hidden,
        )
    return found


def _model_of(document: dict[str, Any], fields: tuple[FieldPath, ...]) -> str | None:
    for field in fields:
        for value in (document.get(field[0]),) if len(field) == 1 else values_at(document, field):
            if isinstance(value, str) and value:
                return value
    return None


@lru_cache(maxsize=1024)
def path_of(url: str) -> str:
    """Return the path of a URL."""
    return urlsplit(url).path or "/"


def _query(url: str) -> list[str]:
    return urlsplit(url).query.split("&")


def estimate(body: bytes | None, profile: Profile | None = None, url: str = "") -> dict[str, int]:
    """Estimate the cost of a request, by unit, without anything learned."""
    request = read_request(profile or shipped_profile(), url, body)
    return units_of(request, request.estimate_input(), request.bound)


def units_of(request: RequestTokens, input_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return the cost by unit of a request with this many tokens of input, and of each output.

    Money is the most that these tokens can cost; the fee of the request is not part of it.
    """
    profile = request.profile
    output = output_tokens * request.times
    if profile.output_rates:
        rate = profile.output_rate(request.model)
        # Else the bound counts from the start, whatever its tokens count later.
        output *= rate if rate > 1 or profile.charges == "usage" else 1
    found = {}
    for unit, takes_input, takes_output in profile.estimated_units:
        found[unit] = min(MAX_INTEGER, input_tokens * takes_input + output * takes_output)
    if request.price is not None:
        found[request.price.unit] = request.price.estimate(input_tokens, output_tokens * request.times)
    return found


def largest_output(request: RequestTokens, limits: Iterable[Limit], input_tokens: int, paid_input: int) -> int:
    """Return the tokens of the longest output that limits can ever allow; `paid_input` is for money."""
    found, each = MAX_INTEGER, request.times * request.profile.output_rate(request.model)
    for limit in limits:
        parts = request.profile.counts.get(limit.unit, ())
        if request.price is not None and limit.unit == request.price.unit:
            paid = request.price.output_within(limit.burst - request.fee, paid_input)
            found = min(found, paid // request.times)
        if "output" in parts:
            left = limit.burst - (input_tokens if "input" in parts else 0)
            found = min(found, max(0, left) // each)
    return found


def is_count(value: object) -> bool:
    """Return whether a value is an integer that may be a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


def _largest_at(document: dict[str, Any], paths: tuple[FieldPath, ...]) -> int | None:
    """Return the largest number of tokens or outputs that any of these fields states; None: there is none."""
    largest: int | None = None
    for path in paths:
        if path[0] not in document:
            continue
        for value in (document[path[0]],) if len(path) == 1 else values_at(document, path):
            count = _stated_count(value)
            if count is not None and (largest is None or count > largest):
                largest = count
    return largest


def _stated_count(value: Any) -> int | None:  # noqa: ANN401 - any JSON value
    """Return a number of tokens or outputs that a request states; None: it states none, as with -1.

    Some servers accept `64000.0` and `"64000"`, too. A number above MAX_INTEGER counts as MAX_INTEGER.
    """
    if value.__class__ is int and 0 <= value <= MAX_INTEGER:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value) if len(value) <= MAX_COUNT_DIGITS else MAX_INTEGER
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        return None
    return MAX_INTEGER if value > MAX_INTEGER else ceil(value)


def _with_value(document: dict[str, Any], path: FieldPath, value: int) -> dict[str, Any]:
    """Return a copy of a document with another value at a path."""
    inner = document.get(path[0])
    new = value if len(path) == 1 else _with_value(inner if isinstance(inner, dict) else {}, path[1:], value)
    return {**document, path[0]: new}


# ---- media -----------------------------------------------------------------------------------------------------------


def _media(document: dict[str, Any], profile: Profile) -> tuple[int, int]:
    """Return the length of all media of a request, and their estimated tokens."""
    length = tokens = 0
    for name, strings in _find_media(_without_tools(document), profile, MAX_DEPTH):
        size = sum(map(len, strings))
        length += size
        tokens += profile.media[name].estimate(size)
    return length, tokens


def _without_tools(document: dict[str, Any]) -> list[Any]:
    return [value for name, value in document.items() if name not in TOOL_FIELDS]


def _find_media(value: object, profile: Profile, depth: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the media of a request, with their data and addresses; all other strings beside these are text."""
    if depth == 0:
        return
    if isinstance(value, dict):
        for name, own in _media_of_mapping(value, profile):
            yield name, list(_media_strings(own, name))
        value = list(value.values())
    if isinstance(value, list):
        for each in [each for each in value if each.__class__ in CONTAINERS]:
            yield from _find_media(each, profile, depth - 1)


def _media_of_mapping(value: dict[str, Any], profile: Profile) -> Iterator[tuple[str, object]]:
    """Yield the media of a mapping whose `type`, or some of whose keys, are those of media, and their own fields."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in profile.media:
        kind = None
    for key, own in value.items():
        if key in profile.media and isinstance(own, (dict, str)):
            # An `input_image` has its address in `image_url`: one medium.
            is_same = kind is not None and profile.media[key].tokens > 0
            yield (kind if kind is not None and is_same else key), own
            kind = None if is_same or key == kind else kind
    if kind is not None:
        yield kind, value.get(SOURCE)


def _media_strings(own: object, name: str) -> Iterator[str]:
    """Yield the strings of a medium's own field that are its data or its address."""
    if isinstance(own, str):
        if _is_address(own) or (not name.endswith(URL_SUFFIX) and _is_base64(own)):
            yield own
    elif isinstance(own, dict) and _may_be_media(own):
        for key in MEDIA_FIELDS:
            each = own.get(key)
            if isinstance(each, str) and (_is_address(each) or (key in DATA_FIELDS and _is_base64(each))):
                yield each
        yield from _media_strings(own.get(SOURCE) if isinstance(own.get(SOURCE), dict) else None, name)


def _may_be_media(own: dict[str, Any]) -> bool:
    """Return whether a medium is not a text that is sent as one."""
    kinds = [own[name] for name in MEDIA_TYPES if name in own]
    return own.get("type") != "text" and all(isinstance(kind, str) and MEDIA_TYPE.match(kind) for kind in kinds)


def _is_address(value: str) -> bool:
    return ADDRESS.match(value) is not None and " " not in value and "\n" not in value and value.isascii()


def _is_base64(value: str) -> bool:
    return len(value) > 1 and value.isascii() and not value.encode().translate(None, BASE64)


def _texts(document: dict[str, Any], profile: Profile) -> tuple[list[str], int]:
    """Return the strings of a request that are not media, for a tokenizer, and how many numbers its lists contain.

    A list of numbers contains token ids: the program has tokenized its input itself.
    """
    found = _find_media(_without_tools(document), profile, MAX_DEPTH)
    media = {id(each) for _, strings in found for each in strings}
    texts, numbers = [], 0
    waiting: list[Any] = [value for name, value in document.items() if name != "model"][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if id(value) not in media:
                texts.append(value)
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list):
            numbers += sum(each.__class__ is int for each in value)
            waiting += reversed(value)
    return texts, numbers
