"""The head of a request, which is parsed and checked once, and a cache of the heads that clients repeat.

A client sends the same head with almost every request, byte for byte. What the parser and the checks of a head return
depends on nothing but these bytes: the settings of a running service do not change. So a head that was checked is
remembered with its route, if the length of its body is part of it. The body, the load of the service and the policies
are checked for every request.

Heads contain tokens. They are found by a keyed hash, so the time of a look-up says nothing about them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.service._api.problems import HTTPReply
    from tidegate.service._api.verbs import ServiceVerb

    Headers = dict[bytes, bytes]
    Reply = bytes | HTTPReply  # bytes: the JSON of a response with the status 200
    Running = Coroutine[Any, Any, Reply]
    Run = Callable[["RequestHead", bytes, "Exchange"], Reply | Running]

MAX_KNOWN_HEADS: Final = 1024  # heads with different lengths of the body count separately
OTHER: Final = "other"  # the histogram of requests for unknown paths, health checks and files
MAX_KNOWN_HEAD: Final = 1024  # bytes


class Exchange(Protocol):
    """A request and its response on a connection, as the App sees it."""

    address: str  # of the client
    timed_as: str  # the histogram that its duration is added to


class ServiceRoute(NamedTuple):
    """What a path does: `run` returns the response, or a coroutine that returns it."""

    name: str  # of the histogram
    methods: tuple[str, ...]
    authenticate: Callable[[Headers], object]
    run: Run
    verb: ServiceVerb[Any, Any] | None = None  # takes JSON
    bounded: bool = False  # is refused if too many requests are active


class RequestHead(NamedTuple):
    """A head. `body_size` is None for a chunked body; `route` is None if the request was refused."""

    route: ServiceRoute | None
    method: str
    path: str
    query: bytes
    headers: Headers
    body_size: int | None
    keep_alive: bool


class KnownHeads:
    """The heads that one server remembers, by their bytes."""

    def __init__(self) -> None:
        """Start without heads."""
        self._heads: dict[bytes, RequestHead] = {}
        self.find: Callable[[bytes], RequestHead | None] = self._heads.get

    def remember(self, data: bytes, head: RequestHead) -> None:
        """Remember a head that was checked, unless it is long, or different in each request."""
        if len(data) > MAX_KNOWN_HEAD or b"idempotency-key" in head.headers:
            return
        if len(self._heads) >= MAX_KNOWN_HEADS:
            self._heads.clear()
        self._heads[data] = head
