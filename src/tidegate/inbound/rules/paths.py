"""Endpoints as configurations write them, and the tree that finds those which a path matches.

An endpoint is a path with
    *               one segment, or, at the end, everything beneath and the path itself: /api/timeline/*
    {name} <name>   one segment, as routers write it; {name:path} <path:name> at the end: everything beneath
and the most specific one wins: segment by segment from the left, a literal before `*` before everything beneath.

The tree compares folded readings (see `rules.path_readings`). Each endpoint also has a regular expression that
compares literally: it matches what a router is sure to match whose route is written like the endpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

from tidegate.errors import ConfigError
from tidegate.inbound.rules.path_readings import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

ONE_SEGMENT, ALL_BENEATH = "{}", "{*}"  # canonical segments
PARAMETER = re.compile(r"\{[^{}/:]+(?::(?P<brace>[^{}/]+))?\}|<(?:(?P<angle>[^<>/:]+):)?[^<>/]+>")
ANY_METHOD: Final = ""  # in place of a method: whatever is not named
LITERAL, SINGLE, PATH_CONVERTER = 0, 1, 2  # what a segment of an endpoint is, the most specific first

# What each converter of a router is sure to match: the least that Werkzeug, Django and Starlette agree on.
CONVERTERS: Final = {
    "": "[^/]+",
    "str": "[^/]+",
    "string": "[^/]+",
    "int": "[0-9]+",
    "float": r"[0-9]+\.[0-9]+",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "slug": "[-a-zA-Z0-9_]+",
    "path": r"[^/\n].*",  # Werkzeug's begins with no slash; no router's takes a line break
}
ALL: Final = "(?:/.*)?"  # with the slash before it
NEVER: Final = "(?!)"  # a converter of the application's own may match anything or nothing


class Found(NamedTuple, Generic[T]):
    """An endpoint that a path matches: what it leads to, how specific it is, and how it is compared literally."""

    target: T
    kinds: tuple[int, ...]  # LITERAL, SINGLE or BENEATH, of each segment
    path: str  # canonical
    parts: tuple[str, ...]  # of the regular expression: one of each segment
    literally: re.Pattern[str]
    plain: bool  # whether it matches every clean path literally that it matches folded

    def covers(self, template: str) -> bool:
        """Tell whether the endpoint matches whatever the route with this template matches."""
        pairs = zip(self.parts, parts_of(template), strict=False)  # as many: their canonical forms are the same
        return all(ours in (theirs, CONVERTERS[""], ALL) for ours, theirs in pairs)


def canonical(endpoint: str) -> str:
    """Write an endpoint or a route template with {} for one segment and {*} for everything beneath."""
    if not endpoint.startswith("/"):
        raise ConfigError(f"a path starts with '/', as in '/{endpoint}'")
    segments = [_canonical(segment) for segment in fold(unquote(endpoint)).split("/")]
    if segments[-1] == "*":
        segments[-1] = ALL_BENEATH
    segments = [ONE_SEGMENT if segment == "*" else segment for segment in segments]
    if ALL_BENEATH in segments[:-1]:
        raise ConfigError(f"only the end of a path can stand for everything beneath, as in '/api/*', not {endpoint!r}")
    for segment in segments:
        if segment not in (ONE_SEGMENT, ALL_BENEATH) and re.search(r"[*?#;<>{}\\\x00-\x20\x7f]|^\.\.?$", segment):
            message = f"{segment!r} in {endpoint!r} is no segment of a path: write it plainly, or '*', '{{name}}'"
            raise ConfigError(message)
    return "/".join(segments)


def _converter(segment: str) -> str | None:
    """Tell by which converter a segment is a parameter; None: it is none."""
    found = PARAMETER.fullmatch(segment)
    return None if found is None else found["brace"] or found["angle"] or ""


def _canonical(segment: str) -> str:
    converter = _converter(segment)
    return segment if converter is None else ALL_BENEATH if converter == "path" else ONE_SEGMENT


def parts_of(endpoint: str) -> tuple[str, ...]:
    """Give the regular expression of each segment: what a router is sure to match whose route is written like this."""
    *segments, last = unquote(endpoint).split("/")
    return (*map(_part, segments), ALL if last == "*" else _part(last))


def _part(segment: str) -> str:
    converter = "" if segment == "*" else _converter(segment)
    return re.escape(segment) if converter is None else CONVERTERS.get(converter, NEVER)


def _compile(endpoint: str, target: T) -> Found[T]:
    """Work out everything that an endpoint is compared by."""
    path, parts = canonical(endpoint), parts_of(endpoint)
    segments = path.split("/")
    kinds = tuple(
        PATH_CONVERTER if segment == ALL_BENEATH else SINGLE if segment == ONE_SEGMENT else LITERAL
        for segment in segments[1:]
    )
    alike = (part in (CONVERTERS[""], ALL, re.escape(own)) for part, own in zip(parts, segments, strict=False))
    plain = len(parts) == len(segments) and all(alike)
    return Found(target, kinds, path, parts, re.compile("/".join(parts).replace(f"/{ALL}", ALL)), plain)


class PathTree(Generic[T]):
    """Finds the endpoints of a path and method. Those without `*` are looked up whole, others segment by segment."""

    __slots__ = ("_exact", "_root", "_templates")

    def __init__(self) -> None:
        """Start empty."""
        self._exact: dict[str, dict[str, Found[T]]] = {}
        self._templates: dict[str, dict[str, Found[T]]] = {}
        self._root: _Node[T] = _Node()

    def add(self, endpoint: str, methods: Iterable[str], target: T) -> T | None:
        """Set the target of an endpoint, for some methods or (none given) for all that are not named elsewhere.

        Where one has been set before, that stays and is given back.
        """
        found = _compile(endpoint, target)
        path = found.path
        taken = None
        for method in methods or (ANY_METHOD,):
            known = self._methods(path).setdefault(method, found)
            if known is not found:
                taken = known.target
        return taken

    def _methods(self, path: str) -> dict[str, Found[T]]:
        if ONE_SEGMENT not in path and ALL_BENEATH not in path:
            return self._exact.setdefault(path, {})
        if path in self._templates:
            return self._templates[path]
        node = self._root
        *segments, last = path.split("/")[1:]
        for segment in segments:
            node = node.child(segment)
        found = node.beneath if last == ALL_BENEATH else node.child(last).here
        self._templates[path] = found
        return found

    def template(self, template: str, method: str) -> Found[T] | None:
        """Find the endpoint that is written like a route template, whatever its parameters are called."""
        try:
            path = canonical(template)
        except ConfigError:
            return None
        methods = self._exact.get(path) or self._templates.get(path)
        return None if methods is None else _of(methods, method)

    def matching(self, path: str, method: str) -> Iterator[Found[T]]:
        """Give all endpoints that a folded reading of a path matches, the most specific first."""
        exact = _of(self._exact.get(path, {}), method)
        if exact is not None:
            yield exact
        if self._templates:
            yield from self._root.matching(path.split("/")[1:] if path != "/" else [], 0, method)

    def find(self, path: str, method: str) -> T | None:
        """Find the target of the most specific endpoint that a folded reading of a path matches."""
        found = next(self.matching(path, method), None)
        return None if found is None else found.target


class _Node(Generic[T]):
    """A segment of the endpoints that have one with `*` or {}: what may follow it, and the targets here and beneath."""

    __slots__ = ("beneath", "here", "literals", "one")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[T]] = {}
        self.one: _Node[T] | None = None
        self.here: dict[str, Found[T]] = {}
        self.beneath: dict[str, Found[T]] = {}

    def child(self, segment: str) -> _Node[T]:
        """Give the node of a segment that follows, a new one if there was none."""
        if segment == ONE_SEGMENT:
            self.one = self.one or _Node()
            return self.one
        return self.literals.setdefault(segment, _Node())

    def matching(self, segments: list[str], place: int, method: str) -> Iterator[Found[T]]:
        """Give what follows literally, then any segment, then everything beneath."""
        if place == len(segments):
            found = _of(self.here, method)
            if found is not None:
                yield found
        else:
            for node in (self.literals.get(segments[place]), self.one):
                if node is not None:
                    yield from node.matching(segments, place + 1, method)
        found = _of(self.beneath, method)
        if found is not None:
            yield found


def _of(methods: dict[str, Found[T]], method: str) -> Found[T] | None:
    """Choose by method; HEAD does what GET does, unless it is named itself."""
    found = methods.get(method)
    if found is None and method == "HEAD":
        found = methods.get("GET")
    return methods.get(ANY_METHOD) if found is None else found
