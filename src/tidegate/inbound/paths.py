"""Paths as a router might read them, and the tree that finds what an endpoint is written for.

Nobody escapes a category by writing its path differently. How an application reads an odd path depends on its router
and on what stands in between, so an odd path is looked up in every reading, and the strictest answer counts:

    as written      upper case, doubled slashes and a slash at the end mean nothing: /API//cluster/
    decoded         percent-encoding undone, however often it was done; backslashes are slashes: /api%2fcluster
    cut             without ;parameters of segments, a ?query or #fragment, control characters: /api/cluster;x=1
    resolved        . and .. followed, doubled slashes merged before or after that: /api/./x/../cluster

Endpoints are written as paths with
    *               one segment, or, at the end, everything beneath and the path itself: /api/timeline/*
    {name} <name>   one segment, as routers write it; {name:path} <path:name> at the end: everything beneath
and the most specific one wins: segment by segment from the left, a literal before `*` before everything beneath.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from urllib.parse import unquote

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

# A path with one reading: lower case, nothing encoded, no empty, dotted or parametrised segment.
CLEAN = re.compile(r"/|(?:/[a-z0-9_~!$&'()+,=:@*-][a-z0-9_~!$&'()+,=:@*.-]*)+")
SLASHES = re.compile(r"/{2,}")
CUT = re.compile(r";[^/]*|[?#].*", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x20\x7f]+")
ROUNDS: Final = 3  # times that percent-encoding is undone

ONE, REST = "{}", "{*}"  # canonical segments
SEGMENT = re.compile(r"\{[^{}/:]+\}|\{[^{}/:]+:(?!path\})[^{}/]+\}|<(?!path:)[^<>/]+>")  # one segment
BENEATH = re.compile(r"\{[^{}/:]+:path\}|<path:[^<>/]+>")  # everything beneath
ANY: Final = ""  # in place of a method: whatever is not named


def readings(path: str) -> tuple[str, ...]:
    """Give the different ways to read a path; a clean one has a single way."""
    if CLEAN.fullmatch(path):
        return (path,)
    decoded = path
    for _ in range(ROUNDS):
        decoded = unquote(decoded)
    decoded = decoded.replace("\\", "/")
    cut = CONTROL.sub("", CUT.sub("", decoded))
    found = (path, decoded, cut, _resolve(cut), _resolve(SLASHES.sub("/", cut)))
    return tuple(dict.fromkeys(_tidy(reading) for reading in found))


def _tidy(path: str) -> str:
    """Drop what means nothing to any router: case, doubled slashes, the slash at the end."""
    return "/" + SLASHES.sub("/", path.lower()).strip("/")


def _resolve(path: str) -> str:
    """Follow . and .. (RFC 3986, 5.2.4)."""
    segments: list[str] = []
    for segment in path.removeprefix("/").split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    return "/" + "/".join(segments)


def canonical(endpoint: str) -> str:
    """Write an endpoint or a route template with {} for one segment and {*} for everything beneath."""
    if not endpoint.startswith("/"):
        raise ConfigError(f"a path starts with '/', as in '/{endpoint}'")
    segments = [_segment(segment) for segment in _tidy(unquote(endpoint)).split("/")]
    if segments[-1] == "*":
        segments[-1] = REST
    segments = [ONE if segment == "*" else segment for segment in segments]
    if REST in segments[:-1]:
        raise ConfigError(f"only the end of a path can stand for everything beneath, as in '/api/*', not {endpoint!r}")
    for segment in segments:
        if segment not in (ONE, REST) and re.search(r"[*?#;<>{}\\\x00-\x20\x7f]|^\.\.?$", segment):
            message = f"{segment!r} in {endpoint!r} is no segment of a path: write it plainly, or '*', '{{name}}'"
            raise ConfigError(message)
    return "/".join(segments)


def _segment(segment: str) -> str:
    if BENEATH.fullmatch(segment):
        return REST
    return ONE if SEGMENT.fullmatch(segment) else segment


class Tree(Generic[T]):
    """Finds the target of a path and method. Paths without `*` are looked up as a whole, others segment by segment."""

    __slots__ = ("_exact", "_root", "_templates")

    def __init__(self) -> None:
        """Start empty."""
        self._exact: dict[str, dict[str, T]] = {}
        self._templates: dict[str, dict[str, T]] = {}
        self._root: _Node[T] = _Node()

    def add(self, endpoint: str, methods: Iterable[str], target: T) -> T | None:
        """Set the target of an endpoint, for some methods or (none given) for all that are not named elsewhere.

        Where one has been set before, that stays and is given back.
        """
        path = canonical(endpoint)
        taken = None
        for method in methods or (ANY,):
            known = self._methods(path).setdefault(method, target)
            if known is not target:
                taken = known
        return taken

    def _methods(self, path: str) -> dict[str, T]:
        if ONE not in path and REST not in path:
            return self._exact.setdefault(path, {})
        if path in self._templates:
            return self._templates[path]
        node = self._root
        *segments, last = path.split("/")[1:]
        for segment in segments:
            node = node.child(segment)
        found = node.beneath if last == REST else node.child(last).here
        self._templates[path] = found
        return found

    def exact(self, path: str, method: str) -> T | None:
        """Find the target of a path that is written as a whole."""
        methods = self._exact.get(path)
        return None if methods is None else _of(methods, method)

    def template(self, template: str, method: str) -> T | None:
        """Find the target of a route template that an endpoint is written as, whatever its parameters are called."""
        try:
            path = canonical(template)
        except ConfigError:
            return None
        methods = self._exact.get(path) or self._templates.get(path)
        return None if methods is None else _of(methods, method)

    def find(self, path: str, method: str) -> T | None:
        """Find the target of the most specific endpoint that a reading of a path matches."""
        found = self.exact(path, method)
        if found is None and self._templates:
            return self._root.find(path.split("/")[1:] if path != "/" else [], 0, method)
        return found


class _Node(Generic[T]):
    """A segment of the endpoints that have one with `*` or {}: what may follow it, and the targets here and beneath."""

    __slots__ = ("beneath", "here", "literals", "one")

    def __init__(self) -> None:
        self.literals: dict[str, _Node[T]] = {}
        self.one: _Node[T] | None = None
        self.here: dict[str, T] = {}
        self.beneath: dict[str, T] = {}

    def child(self, segment: str) -> _Node[T]:
        """Give the node of a segment that follows, a new one if there was none."""
        if segment == ONE:
            self.one = self.one or _Node()
            return self.one
        return self.literals.setdefault(segment, _Node())

    def find(self, segments: list[str], place: int, method: str) -> T | None:
        """Try what follows literally, then any segment, then everything beneath."""
        found = None
        if place == len(segments):
            found = _of(self.here, method)
        else:
            for node in (self.literals.get(segments[place]), self.one):
                if found is None and node is not None:
                    found = node.find(segments, place + 1, method)
        return _of(self.beneath, method) if found is None else found


def _of(methods: dict[str, T], method: str) -> T | None:
    """Choose by method; HEAD does what GET does, unless it is named itself."""
    found = methods.get(method)
    if found is None and method == "HEAD":
        found = methods.get("GET")
    return methods.get(ANY) if found is None else found
