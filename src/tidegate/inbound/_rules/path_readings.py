"""Lists the ways in which routers may read the path of a request.

A client must not avoid a category by writing its path differently. How an application reads an unusual path depends on
its router and on proxies in front of it. So such a path has several readings, of two kinds:

    literal   character by character, as routers compare. Routers differ in what they remove or restore: the prefix
              under which the application is mounted (`root_path`), leading slashes, a missing leading slash.
    folded    without anything that a router, proxy or application may ignore or decode:
                upper case, doubled slashes, a trailing slash       /API//cluster/
                repeated percent-encoding, backslashes              /api%2fcluster
                ;parameters, a ?query, a #fragment, control codes   /api/cluster;x=1
                . and .., before or after doubled slashes           /api/./x/../cluster

Verified against the routers of Flask, Django, Starlette, FastAPI and Quart (tests/inbound/test_routers.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlparse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# A path with one reading: lower case, nothing encoded, no empty, dotted or parametrised segment.
CLEAN = re.compile(r"/|(?:/[a-z0-9_~!$&'()+,=:@*-][a-z0-9_~!$&'()+,=:@*.-]*)+")
SLASHES = re.compile(r"/{2,}")
CUT = re.compile(r";[^/]*|[?#].*", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x20\x7f]+")
MAX_DECODE_ROUNDS: Final = 3  # how often percent-encoding is decoded
MAX_MOUNTS: Final = 8  # trailing segments of a mount point that endpoints may include
# Letters that case-insensitive regular expressions match with i, but `casefold` does not convert.
DOTTED_AND_DOTLESS: Final = {0x130: "i", 0x131: "i"}


class Route(NamedTuple):
    """A path within the application, as a router may read it, and the prefixes that endpoints may include."""

    path: str
    prefixes: tuple[str, ...] = ()
    fixed: bool = True  # False if the client chooses the mount point, such as /{tenant}


def wsgi_routes(path: str, script_name: str, own_prefix: str = "") -> tuple[Route, ...]:
    """Return the literal readings of a WSGI request's PATH_INFO below its SCRIPT_NAME.

    `own_prefix` is a prefix that the application removes from paths itself.
    """
    return _routes(path, own_prefix, _prefixes(script_name + own_prefix))


def asgi_routes(
    path: str, root: str, own_prefix: str = "", *, fixed: bool = True, blank: bool = False
) -> tuple[Route, ...]:
    """Return the literal readings of an ASGI request's path below its `root_path`.

    `own_prefix` is the prefix that the application uses instead of `root_path`. `fixed`: the client chose no part of
    the prefix. `blank`: the application reads paths outside the prefix as " ".
    """
    mount = own_prefix or root
    prefixes = _prefixes(mount)
    routes = _routes(path, mount, prefixes, fixed=fixed)
    outside = blank and mount and (path == mount or not path.startswith(mount))
    return (*routes, Route("/ ", prefixes, fixed)) if outside else routes


def _routes(path: str, mount: str, prefixes: tuple[str, ...], *, fixed: bool = True) -> tuple[Route, ...]:
    if not mount and path.startswith("/") and not path.startswith("//"):
        return (Route(path, prefixes, fixed),)
    found = (literal for reading in _below(path, mount) for literal in _literal(reading))
    return tuple(Route(literal, prefixes, fixed) for literal in dict.fromkeys(found))


def _prefixes(mount: str) -> tuple[str, ...]:
    """Return the complete mount point, and its trailing parts for applications that are mounted themselves."""
    if not mount:
        return ()
    segments = [segment for segment in mount.split("/") if segment][-MAX_MOUNTS:]
    return tuple("/" + "/".join(segments[position:]) for position in range(len(segments)))


def _below(path: str, root: str) -> Iterator[str]:
    """Yield the paths that routers read within an application mounted under `root`."""
    rest = path[len(root) :] if root and path.startswith(root) else None
    if rest is not None:
        yield rest  # Django and Quart, with or without a slash
    if rest is None or (rest and not rest.startswith("/")):
        yield path  # Starlette and FastAPI, if no slash follows
    if rest is None and root and root in path:
        yield path.partition(root)[2]  # Quart before 0.21, at any position


def _literal(path: str) -> Iterator[str]:
    """Yield the strings that routers compare with their routes."""
    if path.startswith("/") or not path:
        yield path
        if path.startswith("//"):
            yield "/" + path.lstrip("/")  # Werkzeug: Flask and Quart
        return
    yield "/" + path  # Werkzeug restores the slash
    yield from _literal("/" + path.partition("/")[2])  # Werkzeug's DispatcherMiddleware removes a name
    try:
        yield "/" + urlparse(path).path.lstrip("/")  # Quart parses it as a URL, as in `GET http://host/path HTTP/1.1`
    except ValueError:
        return  # not a URL


def readings(path: str) -> tuple[str, ...]:
    """Return the folded readings of a path; a clean path has only one."""
    if CLEAN.fullmatch(path):
        return (path,)
    decoded = path
    for _ in range(MAX_DECODE_ROUNDS):
        decoded = unquote(decoded)
    decoded = decoded.replace("\\", "/")
    cut = CONTROL.sub("", CUT.sub("", decoded))
    found = (path, decoded, cut, _resolve(cut), _resolve(SLASHES.sub("/", cut)))
    return tuple(dict.fromkeys(fold(reading) for reading in found))


def all_readings(routes: Iterable[Route]) -> dict[Route, None]:
    """Return the folded readings of routes, including dots that lead out of the mount point and back into it."""
    found: dict[Route, None] = {}
    for path, prefixes, fixed in routes:
        found.update((Route(reading, prefixes, fixed), None) for reading in readings(path))
        for prefix in prefixes[:1] if ".." in path or "%" in path else ():
            start = fold(prefix) + "/"
            whole = (reading for reading in readings(prefix + path) if reading.startswith(start))
            found.update((Route(reading[len(start) - 1 :], prefixes, fixed), None) for reading in whole)
    return found


def fold(path: str) -> str:
    """Remove what some routers ignore: case, doubled slashes, the trailing slash."""
    folded = path.lower() if path.isascii() else path.translate(DOTTED_AND_DOTLESS).casefold()
    return "/" + SLASHES.sub("/", folded).strip("/")


def _resolve(path: str) -> str:
    """Resolve . and .. (RFC 3986, 5.2.4)."""
    segments: list[str] = []
    for segment in path.removeprefix("/").split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    return "/" + "/".join(segments)
