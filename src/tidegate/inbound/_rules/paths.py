"""Endpoint patterns of a configuration, and the tree that finds the endpoints which match a path.

An endpoint is a path with
    *               one segment, or, at the end, the path itself and all subpaths: /api/timeline/*
    {name} <name>   one segment, as routers write it; {name:path} <path:name> at the end: all subpaths
and the most specific one wins: segment by segment from the left, a literal before `*` before all subpaths.

The tree compares folded readings (see `rules.path_readings`). Each endpoint also has a regular expression for literal
comparison. It matches only paths that every router matches with a route written like the endpoint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

from tidegate.errors import ConfigError
from tidegate.inbound._rules.path_readings import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

ONE_SEGMENT, ALL_SUBPATHS = "{}", "{*}"  # canonical segments
PARAMETER = re.compile(r"\{[^{}/:]+(?::(?P<brace>[^{}/]+))?\}|<(?:(?P<angle>[^<>/:]+):)?[^<>/]+>")
ANY_METHOD: Final = ""  # matches methods that are not named
LITERAL, SINGLE, PATH_CONVERTER = 0, 1, 2  # kinds of segments, the most specific first

# What each converter matches in all of Werkzeug, Django and Starlette.
CONVERTERS: Final = {
    "": "[^/]+",
    "str": "[^/]+",
    "string": "[^/]+",
    "int": "[0-9]+",
    "float": r"[0-9]+\.[0-9]+",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "slug": "[-a-zA-Z0-9_]+",
    "path": r"[^/\n].*",  # Werkzeug's does not start with a slash; no router's matches a line break
}
SUBPATHS: Final = "(?:/.*)?"  # with the slash before it
NEVER: Final = "(?!)"  # an application's own converter may match anything or nothing


class FoundEndpoint(NamedTuple, Generic[T]):
    """A compiled endpoint: its target, how specific it is, and its pattern for literal comparison."""

    target: T
    kinds: tuple[int, ...]  # LITERAL, SINGLE or PATH_CONVERTER, by segment
    path: str  # canonical
    patterns: tuple[str, ...]  # regular expressions, by segment
    literal_pattern: re.Pattern[str]
    is_plain: bool  # whether it matches clean paths literally whenever it matches them folded

    def covers(self, template: str) -> bool:
        """Return whether the endpoint matches every path that the route with this template matches."""
        # Both have the same length, because their canonical forms are equal.
        pairs = zip(self.patterns, segment_patterns(template), strict=False)
        return all(ours in (theirs, CONVERTERS[""], SUBPATHS) for ours, theirs in pairs)


def canonical(endpoint: str) -> str:
    """Rewrite an endpoint or a route template with {} for one segment and {*} for all subpaths."""
    if not endpoint.startswith("/"):
        raise ConfigError(f"a path must start with '/', as in '/{endpoint}'")
    segments = [_canonical(segment) for segment in fold(unquote(endpoint)).split("/")]
    if segments[-1] == "*":
        segments[-1] = ALL_SUBPATHS
    segments = [ONE_SEGMENT if segment == "*" else segment for segment in segments]
    if ALL_SUBPATHS in segments[:-1]:
        raise ConfigError(f"a wildcard for all subpaths must be at the end, as in '/api/*', not {endpoint!r}")
    for segment in segments:
        if segment not in (ONE_SEGMENT, ALL_SUBPATHS) and re.search(r"[*?#;<>{}\\\x00-\x20\x7f]|^\.\.?$", segment):
            message = f"{segment!r} in {endpoint!r} is not a valid path segment: use a literal, '*' or '{{name}}'"
            raise ConfigError(message)
    return "/".join(segments)


def _converter(segment: str) -> str | None:
    """Return the converter of a parameter segment ("" by default); None if the segment is not a parameter."""
    found = PARAMETER.fullmatch(segment)
    return None if found is None else found["brace"] or found["angle"] or ""


def _canonical(segment: str) -> str:
    converter = _converter(segment)
    return segment if converter is None else ALL_SUBPATHS if converter == "path" else ONE_SEGMENT


def segment_patterns(endpoint: str) -> tuple[str, ...]:
    """Return the regular expression of each segment: what every router matches with a route written like this."""
    *segments, last = unquote(endpoint).split("/")
    return (*map(_segment_pattern, segments), SUBPATHS if last == "*" else _segment_pattern(last))


def _segment_pattern(segment: str) -> str:
    converter = "" if segment == "*" else _converter(segment)
    return re.escape(segment) if converter is None else CONVERTERS.get(converter, NEVER)


def _compile(endpoint: str, target: T) -> FoundEndpoint[T]:
    """Compile an endpoint."""
    path, patterns = canonical(endpoint), segment_patterns(endpoint)
    segments = path.split("/")
    kinds = tuple(
        PATH_CONVERTER if segment == ALL_SUBPATHS else SINGLE if segment == ONE_SEGMENT else LITERAL
        for segment in segments[1:]
    )
    plain_segments = (
        pattern in (CONVERTERS[""], SUBPATHS, re.escape(segment))
        for pattern, segment in zip(patterns, segments, strict=False)
    )
    is_plain = len(patterns) == len(segments) and all(plain_segments)
    literal_pattern = re.compile("/".join(patterns).replace(f"/{SUBPATHS}", SUBPATHS))
    return FoundEndpoint(target, kinds, path, patterns, literal_pattern, is_plain)


class PathTree(Generic[T]):
    """Finds the endpoints of a path and method: literal paths in a dictionary, others segment by segment."""

    __slots__ = ("_exact", "_root", "_templates")

    def __init__(self) -> None:
        """Start empty."""
        self._exact: dict[str, dict[str, FoundEndpoint[T]]] = {}
        self._templates: dict[str, dict[str, FoundEndpoint[T]]] = {}
        self._root: _Node[T] = _Node()

    def add(self, endpoint: str, methods: Iterable[str], target: T) -> T | None:
        """Set the target of an endpoint, for some methods or (none given) for all methods not named elsewhere.

        If the endpoint already has a target, keep it and return it.
        """
        found = _compile(endpoint, target)
        path = found.path
        taken = None
        for method in methods or (ANY_METHOD,):
            known = self._methods(path).setdefault(method, found)
            if known is not found:
                taken = known.target
        return taken

    def _methods(self, path: str) -> dict[str, FoundEndpoint[T]]:
        if ONE_SEGMENT not in path and ALL_SUBPATHS not in path:
            return self._exact.setdefault(path, {})
        if path in self._templates:
            return self._templates[path]
        node = self._root
        *segments, last = path.split("/")[1:]
        for segment in segments:
            node = node.child(segment)
        found = node.subpaths if last == ALL_SUBPATHS else node.child(last).here
        self._templates[path] = found
        return found

    def find_template(self, template: str, method: str) -> FoundEndpoint[T] | None:
        """Find the endpoint that is written like a route template, ignoring parameter names."""
        try:
            path = canonical(template)
        except ConfigError:
            return None
        methods = self._exact.get(path) or self._templates.get(path)
        return None if methods is None else _select_method(methods, method)

    def find_all(self, path: str, method: str) -> Iterator[FoundEndpoint[T]]:
        """Yield all endpoints that match a folded reading of a path, the most specific first."""
        exact = _select_method(self._exact.get(path, {}), method)
        if exact is not None:
            yield exact
        if self._templates:
            yield from self._root.find_all(path.split("/")[1:] if path != "/" else [], 0, method)

    def find(self, path: str, method: str) -> T | None:
        """Return the target of the most specific endpoint that matches a folded reading of a path."""
        found = next(self.find_all(path, method), None)
        return None if found is None else found.target


class _Node(Generic[T]):
    """A node for one segment: the following segments, and the endpoints that end here or match all subpaths."""

    __slots__ = ("here", "literals", "one", "subpaths")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[T]] = {}
        self.one: _Node[T] | None = None
        self.here: dict[str, FoundEndpoint[T]] = {}
        self.subpaths: dict[str, FoundEndpoint[T]] = {}

    def child(self, segment: str) -> _Node[T]:
        """Return the node of a following segment; create it if it is missing."""
        if segment == ONE_SEGMENT:
            self.one = self.one or _Node()
            return self.one
        return self.literals.setdefault(segment, _Node())

    def find_all(self, segments: list[str], position: int, method: str) -> Iterator[FoundEndpoint[T]]:
        """Yield literal matches, then single wildcards, then wildcards for all subpaths."""
        if position == len(segments):
            found = _select_method(self.here, method)
            if found is not None:
                yield found
        else:
            for node in (self.literals.get(segments[position]), self.one):
                if node is not None:
                    yield from node.find_all(segments, position + 1, method)
        found = _select_method(self.subpaths, method)
        if found is not None:
            yield found


def _select_method(methods: dict[str, FoundEndpoint[T]], method: str) -> FoundEndpoint[T] | None:
    """Select the endpoint of a method; HEAD uses the endpoint of GET unless it has its own."""
    found = methods.get(method)
    if found is None and method == "HEAD":
        found = methods.get("GET")
    return methods.get(ANY_METHOD) if found is None else found
