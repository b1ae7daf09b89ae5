"""What a request uses that is not in the request: earlier conversations, stored prompts, files, tools of the provider.

The profile names it (`unbounded`), the provider file may give it a cost. A strict call that uses anything else of that
kind is refused, because nothing bounds what it costs; so is one whose body cannot be read, or cannot be given a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.core._algorithms import NEVER, View
from tidegate.core._decision import Decision
from tidegate.errors import Denied
from tidegate.outbound._providers.profile import WEBSOCKET, matches_model, values_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate.outbound._providers.profile import Profile
    from tidegate.outbound._providers.provider import Provider

MAX_DEPTH: Final = 50  # levels of a request that are searched; a deeper one counts as unbounded
TOO_DEEP: Final = "nesting"  # the name of what is deeper
BODY: Final = "body"  # the field of a request that cannot be read
SOURCE: Final = "source"  # of a medium: its data, its address or its file
ITEM_REFERENCE: Final = "item_reference"  # of OpenAI; an item with nothing but an `id` is one, too
ABSENT: Final[tuple[object, ...]] = (
    None,
    False,
    "",
    [],
)  # values of a field that is as good as missing; `{}` may switch something on
TOOLS: Final = "tools"
CONTAINERS: Final = (dict, list)
MAX_SHOWN: Final = 80  # characters of the name of a tool in an error
# What a program or a model wrote, and the provider does not follow: schemas of tools, arguments and results of calls.
NOT_FOLLOWED: Final = frozenset(
    (
        "parameters",
        "parametersJsonSchema",
        "parameters_json_schema",
        "input_schema",
        "inputSchema",
        "schema",
        "json_schema",
        "responseSchema",
        "response_schema",
        "responseJsonSchema",
        "functionCall",
        "function_call",
        "toolUse",
        "metadata",
    )
)
RESPONSES: Final = ("functionResponse", "function_response")  # of Google: what the program returned may have files
FUNCTION_PARTS_FIELD: Final = "parts"
ARGUMENTS: Final = {"tool_use": "input"}  # the same, by the type of its mapping


class UnboundedCost(Denied):
    """A strict call was not sent, because nothing bounds what it costs; `field` is the part of the request."""

    def __init__(self, message: str, field: str, decision: Decision) -> None:
        """Name the field."""
        super().__init__(message, decision)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling."""
        return type(self), (str(self), self.field, self.decision)


def refuse(provider: Provider, message: str, field: str) -> UnboundedCost:
    """Return the error of a call that is not sent at all."""
    decision = Decision.of_views(0, provider.limits, [View((0, NEVER, 0))] * len(provider.limits), within_limits=False)
    return UnboundedCost(f"provider {provider.name}: {message}", field, decision)


def unknown_cost(provider: Provider, name: str) -> UnboundedCost:
    """Return the error of a call with something of unknown cost."""
    name = name[:MAX_SHOWN]
    example = f"unbounded: {{{name}: {{tokens: 50_000}}}}"
    what = {WEBSOCKET: "a WebSocket", TOO_DEEP: f"a body of more than {MAX_DEPTH} levels"}.get(name, repr(name))
    reason = f"the request does not show what {what} costs, and tokens or money are limited"
    return refuse(provider, f"{reason}: leave it out, or give it a cost in the provider file, such as {example}", name)


def unreadable_body(provider: Provider) -> UnboundedCost:
    """Return the error of a strict call whose body says nothing."""
    reason = "the body cannot be read, so nothing bounds what the call costs"
    return refuse(provider, f"{reason}: send a JSON object in memory, plain or with gzip or deflate", BODY)


def repeated_key(provider: Provider) -> UnboundedCost:
    """Return the error of a call whose body has two values for a key: the provider may read the other one."""
    reason = "a key of an object in the body is repeated, so it is not known which value the provider reads"
    return refuse(provider, f"{reason}: write each key once", BODY)


def unset_bound(provider: Provider, name: str) -> UnboundedCost:
    """Return the error of a strict call without a bound, to which none can be added."""
    reason = "nothing bounds the output, and the body cannot be changed because it is signed or compressed"
    return refuse(provider, f"{reason}: set {name}", name)


def find_unbounded(profile: Profile, document: dict[str, Any], body: bytes) -> tuple[str, ...]:
    """Return the names of what a request uses that is not in it; one that is used several times is repeated."""
    unbounded = profile.unbounded
    found = [
        ".".join(path)
        for path in (*unbounded.fields, *unbounded.unreported)
        if path[0] in document and any(value not in ABSENT for value in values_at(document, path))
    ]
    if unbounded.tools is not None and TOOLS in document:
        found += _foreign_tools(document[TOOLS], unbounded.tools)
    if unbounded.pattern is not None and may_contain(unbounded.pattern, body):
        found += _references(document, profile, MAX_DEPTH)
    return tuple(found)


def may_contain(pattern: Any, body: bytes) -> bool:  # noqa: ANN401 - a compiled pattern of bytes
    """Return whether a JSON body may contain a string that a pattern finds, perhaps escaped or in UTF-16."""
    return pattern.search(body) is not None or b"\\u" in body or b"\0" in body


def is_unreported(profile: Profile, document: dict[str, Any]) -> bool:
    """Return whether the response to a request does not report its usage."""
    paths = profile.unbounded.unreported
    return any(path[0] in document and any(v not in ABSENT for v in values_at(document, path)) for path in paths)


def _foreign_tools(tools: object, own: tuple[str, ...]) -> Iterator[str]:
    """Yield the tools that the provider runs: those of another type than the program's `own`, or with another key."""
    if not isinstance(tools, list):
        if tools not in ABSENT:
            yield TOOLS
        return
    for tool in tools:
        if not isinstance(tool, dict):
            yield TOOLS
        elif "type" in tool or "name" in tool:
            kind = tool.get("type")
            if kind is not None and not _is_own(str(kind), own):
                yield str(kind)
        else:
            yield from (str(key) for key in tool if not _is_own(key, own))


def _is_own(kind: str, own: tuple[str, ...]) -> bool:
    return any(matches_model(pattern, kind) for pattern in own)


def _references(value: object, profile: Profile, depth: int) -> Iterator[str]:
    """Yield the references of a request: keys and types that the profile lists, except inside media of a fixed size."""
    if not isinstance(value, (dict, list)):
        return
    if not depth:
        yield TOO_DEEP
    elif isinstance(value, list):
        for each in [each for each in value if each.__class__ in CONTAINERS]:
            yield from _references(each, profile, depth - 1)
            if _has_only_an_id(each) and ITEM_REFERENCE in profile.unbounded.anywhere:
                yield ITEM_REFERENCE
    else:
        yield from _references_of_mapping(value, profile, depth)


def _has_only_an_id(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") is None and value.keys() - {"type"} == {"id"}


def _references_of_mapping(value: dict[str, Any], profile: Profile, depth: int) -> Iterator[str]:
    names, kind = profile.unbounded.anywhere, value.get("type")
    if isinstance(kind, str) and kind in names:
        yield kind
        return
    is_medium = isinstance(kind, str) and _has_fixed_size(profile, kind)
    for key, each in value.items():
        if is_medium and (isinstance(each, str) or key == SOURCE):  # where the medium is; all else is followed
            continue
        if key in names:
            if each not in ABSENT:
                yield from [key] * (len(each) if isinstance(each, list) else 1)
        elif key in RESPONSES and isinstance(each, dict):
            yield from _references(each.get(FUNCTION_PARTS_FIELD), profile, depth - 1)
        elif each.__class__ in CONTAINERS and not _is_skipped(profile, key, kind):
            yield from _references(each, profile, depth - 1)


def _has_fixed_size(profile: Profile, name: str) -> bool:
    medium = profile.media.get(name)
    return medium is not None and medium.tokens > 0


def _is_skipped(profile: Profile, key: str, kind: object) -> bool:
    return key in NOT_FOLLOWED or ARGUMENTS.get(str(kind)) == key or _has_fixed_size(profile, key)
