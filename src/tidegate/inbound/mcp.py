"""Limits for the tools of MCP servers, for the official SDK (`mcp`) and for `fastmcp`.

    limits = ToolLimits({"web_search": "20/1m", "*": "100/1m"}, store="redis://…", costs={"deep_research": 5})

    server = MCPServer("tools", middleware=[limits.middleware()])      # mcp
    server.add_middleware(limits.fastmcp_middleware())                 # fastmcp

A call is charged to the validated identity that makes it: the client, the issuer and the subject of its access token.
It is not charged to its session, which a client can renew. Without authentication, as over stdio, all calls are one
client's. A call that is denied is answered by a tool result that is an error and that a model can read: what was
denied, why, and after how many seconds it may be repeated; there are no header fields over stdio. With
`errors="protocol"`, it is a JSON-RPC error with code 429, which is outside the range that MCP reserves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.joint import reserve_async
from tidegate._limiter.limiter import AsyncLimiter
from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError, Denied, StoreUnavailable
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from tidegate._limiter.reservation import AsyncReservation
    from tidegate._policy.model import OnStoreError
    from tidegate._runtime.clock import Clock
    from tidegate.stores import Store

    Rules = str | Limit | Iterable[str | Limit]
    CallNext = Callable[[Any], Awaitable[Any]]
    Middleware = Callable[[Any, CallNext], Awaitable[Any]]

__all__ = ["ToolDenial", "ToolLimits"]

ALL: Final = "*"  # the limits of all tools together
CALL: Final = "tools/call"
CODE: Final = 429
META: Final = "tidegate/rate-limit"
ANONYMOUS: Final = "anonymous"  # who calls without an access token
CALL_TTL: Final = 3600.0  # seconds after which a slot of a tool that never ended is free again


class ToolDenial(NamedTuple):
    """Why a call was denied; `retry_after` is in seconds, None: never."""

    tool: str
    limits: tuple[str, ...]
    retry_after: float | None
    message: str

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {"code": CODE, "tool": self.tool, "limits": list(self.limits), "retry_after": self.retry_after}


class ToolLimits:
    """Limits the calls of tools, for each identity."""

    def __init__(
        self,
        limits: Mapping[str, Rules],
        *,
        store: str | Store = "memory://",
        costs: Mapping[str, int] | None = None,
        identify: Callable[[Any], str | None] | None = None,
        errors: str = "result",
        name: str = "mcp",
        on_store_error: OnStoreError = "local",
        clock: Clock | None = None,
    ) -> None:
        """Limit these tools; `*` has the limits of all calls of an identity together.

        `costs` are the permits that a call of a tool takes (default: 1). `identify` returns the identity of a call from
        the context of the middleware; None: that of its access token. `name` distinguishes servers that share a store.
        """
        if not isinstance(limits, Mapping) or not limits:
            message = "expected the limits by the name of the tool, such as {'web_search': '20/1m', '*': '100/1m'}"
            raise ConfigError(message, field="limits")
        if errors not in ("result", "protocol"):
            raise ConfigError(f"must be result or protocol, not {errors!r}", field="errors")
        for tool, cost in (costs or {}).items():
            if not isinstance(cost, int) or isinstance(cost, bool) or cost < 0:
                raise ConfigError(f"the cost of {tool} must be an integer of at least 0, not {cost!r}", field="costs")
        self._opened = OpenedStore.open(store, clock=clock)
        self._costs = dict(costs or {})
        self._identify = identify
        self._errors = errors
        self._limiters = {
            tool: AsyncLimiter(
                Policy(f"{name}:{tool}", read_rules(rules), on_store_error=on_store_error),
                store=self._opened.store,
                clock=clock,
            )
            for tool, rules in limits.items()
        }

    async def reserve(self, tool: str, identity: str) -> AsyncReservation | ToolDenial | None:
        """Charge a call of a tool; None: it has no limits."""
        limiters = [self._limiters[each] for each in dict.fromkeys((tool, ALL)) if each in self._limiters]
        if not limiters:
            return None
        cost = self._costs.get(tool, 1)
        try:
            return await reserve_async([(limiter, identity, cost) for limiter in limiters], ttl=CALL_TTL, timeout=0)
        except Denied as denied:
            retry, names = denied.decision.retry_after, denied.decision.violated
            quotas = [
                f"{each.quota} {each.unit} per {each.name}" for each in denied.decision.limits if not each.allowed
            ]
            return ToolDenial(tool, names, retry, describe(tool, cost, retry, quotas))
        except StoreUnavailable:
            message = f"The tool {tool!r} is not available at the moment. Try again in 1 second."
            return ToolDenial(tool, (), 1.0, message)

    async def run(self, tool: str, identity: str, call: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401 - of the tool
        """Call a tool within its limits; returns a ToolDenial if they deny it."""
        held = await self.reserve(tool, identity)
        if held is None:
            return await call()
        if isinstance(held, ToolDenial):
            return held
        async with held:
            try:
                return await call()
            finally:
                await held.commit()  # a tool that failed was called, too; slots are free again

    async def close(self) -> None:
        """Close the store if it was opened from a URL."""
        await self._opened.close_async()

    # ---- the two SDKs ------------------------------------------------------------------------------------------------

    def middleware(self) -> Middleware:
        """Return the middleware for `MCPServer(…, middleware=[…])`, or `Server.middleware`, of the package `mcp`."""
        from mcp.server.auth.middleware.auth_context import get_access_token  # noqa: PLC0415 - the SDK of the server
        from mcp.shared.exceptions import MCPError  # noqa: PLC0415 - as above
        from mcp.types import CallToolResult, TextContent  # noqa: PLC0415 - as above

        def answer(denial: ToolDenial) -> object:
            content = [TextContent(type="text", text=denial.message)]
            return CallToolResult(content=content, is_error=True, _meta={META: denial.as_json()})

        return self._make_middleware(
            lambda context: (context.params or {}).get("name"), get_access_token, answer, MCPError
        )

    def fastmcp_middleware(self) -> Middleware:
        """Return the middleware for `FastMCP.add_middleware`, of the package `fastmcp`."""
        from fastmcp.server.dependencies import get_access_token  # noqa: PLC0415 - the SDK of the server
        from fastmcp.tools.base import ToolResult  # noqa: PLC0415 - as above
        from mcp.shared.exceptions import MCPError  # noqa: PLC0415 - as above

        def answer(denial: ToolDenial) -> object:
            return ToolResult(content=denial.message, meta={META: denial.as_json()}, is_error=True)

        return self._make_middleware(lambda context: context.message.name, get_access_token, answer, MCPError)

    def _make_middleware(
        self,
        tool_of: Callable[[Any], object],
        get_access_token: Callable[[], Any],
        answer: Callable[[ToolDenial], object],
        error: Callable[[int, str, object], BaseException],
    ) -> Middleware:
        async def limit_tools(context: Any, call_next: CallNext) -> Any:  # noqa: ANN401 - types of the SDK
            tool = tool_of(context) if context.method == CALL else None
            if not isinstance(tool, str):
                return await call_next(context)
            found = await self.run(tool, self._find_identity(context, get_access_token()), lambda: call_next(context))
            if not isinstance(found, ToolDenial):
                return found
            if self._errors == "protocol":
                raise error(CODE, found.message, found.as_json())
            return answer(found)

        return limit_tools

    def _find_identity(self, context: Any, token: Any) -> str:  # noqa: ANN401 - types of the SDKs
        """Return who calls: a validated identity, never a session."""
        found = None if self._identify is None else self._identify(context)
        if found is not None:
            return found
        if token is None:
            return ANONYMOUS
        issuer = (token.claims or {}).get("iss")
        parts = (
            str(token.client_id),
            "" if issuer is None else str(issuer),
            str(getattr(token, "subject", None) or ""),
        )
        return "\x1f".join(parts)


def read_rules(rules: Rules) -> tuple[Limit, ...]:
    """Read limits."""
    several = (rules,) if isinstance(rules, (str, Limit)) else tuple(rules)
    return tuple(rule if isinstance(rule, Limit) else Limit.parse(rule) for rule in several)


def describe(tool: str, cost: int, retry: float | None, quotas: list[str]) -> str:
    """Write what a model reads: what was denied, why, and what to do."""
    why = " and ".join(quotas) or "its limit"
    if retry is None:
        return f"The tool {tool!r} was not called: a call costs {cost}, and {why} can never allow it. Do not try again."
    seconds = ceil(retry * 10) / 10
    return (
        f"The tool {tool!r} was not called: the rate limit of {why} is used up. Try again in {seconds:g} seconds; "
        f"until then, continue without it."
    )
