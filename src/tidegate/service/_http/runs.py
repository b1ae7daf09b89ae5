"""Runs over a network: nodes of trees of agents in the store of the service, by token, key of the creator, or id.

A token is a part of the request, never of its URL, and is neither logged nor returned. What it allows is checked here,
by `tidegate.agents`; that the caller may use the service at all, or is an operator, is checked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from tidegate._limiter.joint import async_performer
from tidegate._runtime.flow import run_async
from tidegate.agents import AsyncCredits, AsyncRun, RunDenied, RunRightError, TokenError, list_runs_async
from tidegate.agents._known import KnownRuns
from tidegate.agents._node import CLOSED
from tidegate.agents._tokens import looks_like_token
from tidegate.service._api.responses import DONE
from tidegate.service._api.run_requests import (
    RunChargeResponse,
    RunCreateResponse,
    RunLimitResponse,
    RunListResponse,
    RunReadResponse,
    RunReportResponse,
    RunReportRow,
    RunRow,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.agents import NodeUsage
    from tidegate.service._api.responses import DoneResponse
    from tidegate.service._api.run_requests import (
        RunChargeRequest,
        RunChildRequest,
        RunCreateRequest,
        RunExtendRequest,
        RunOwnerRequest,
        RunReadRequest,
        RunStopRequest,
    )
    from tidegate.stores import Store


class ServiceRuns:
    """The verbs of runs over one store."""

    def __init__(self, store: Store, secrets: Sequence[str] = ()) -> None:
        """Keep runs in a store; `secrets` sign tokens, by default one that the store keeps."""
        self._store = store
        self._secrets = tuple(secrets)
        self._known = KnownRuns(store, secrets)

    async def _find(self, token: Any, identifier: Any) -> AsyncRun:  # noqa: ANN401 - strings, or UNSET
        """Return a node by a token, or by its id: the caller is then an operator."""
        if identifier is UNSET:
            return await self._join(token)
        return await AsyncRun.find(identifier, store=self._store, secret=self._secrets)

    async def _find_owned(self, owner: Any, identifier: Any) -> AsyncRun:  # noqa: ANN401 - as above
        """Return a node by the key of its creator, or by its id."""
        if identifier is UNSET:
            return await self._known.join(owner)
        return await self._find(owner, identifier)

    async def _join(self, token: str) -> AsyncRun:
        """Return a node by a token; the key of a creator is none."""
        if not looks_like_token(token):
            raise TokenError("not a token of a run: the key of a creator only stops, closes and extends")
        return await self._known.join(token)

    def _credits(self, names: Sequence[str]) -> list[AsyncCredits]:
        return [AsyncCredits(name, store=self._store.unleased) for name in names]

    async def create(self, request: RunCreateRequest) -> RunCreateResponse:
        """Create the root of a tree."""
        options: dict[str, Any] = {} if request.node_ttl is None else {"ttl": request.node_ttl}
        run = await AsyncRun(
            request.name,
            store=self._store,
            limits=request.limits,
            secret=self._secrets,
            on_exhausted=self._credits(request.credits),
            max_repeats=request.repeats,
            **options,
        )
        return await _created(run)

    async def child(self, request: RunChildRequest) -> RunCreateResponse:
        """Create a node below another one; it names no credits but those that pay for its parent, too."""
        parent = await self._join(request.token)
        unknown = [name for name in request.credits if name not in parent.paying_credits]
        if unknown:
            message = "only an operator names credits, when the run is created"
            raise RunRightError(f"the run has no credits {unknown[0]!r}: {message}")
        child = await parent.child(
            request.name,
            limits=request.limits,
            ttl=request.node_ttl,
            carve=None if request.carve is UNSET else request.carve,
            on_exhausted=self._credits(request.credits),
            max_repeats=request.repeats,
        )
        return await _created(child)

    async def charge(self, request: RunChargeRequest) -> RunChargeResponse:
        """Charge a call whose cost is known."""
        run = await self._join(request.token)
        costs: Mapping[str, Any] = request.alternatives or {"0": request.cost}
        try:
            held = await run.reserve_first(costs, request=request.request or None)
        except RunDenied as denied:
            return RunChargeResponse(
                allowed=False,
                node=denied.node or "",
                limit=denied.limit,
                needed=denied.needed,
                left={name: dict(limits) for name, limits in denied.left.items()},
                retry_after=denied.decision.retry_after,
                detail=str(denied),
            )
        await held.commit()
        return RunChargeResponse(allowed=True, alternative=held.alternative, node=held.node)

    async def read(self, request: RunReadRequest) -> RunReadResponse:
        """Return what a node and those below it have used."""
        run = await self._find(request.token, request.id)
        return _usage(await run.usage())

    async def report(self, request: RunReadRequest) -> RunReportResponse:
        """Return what was used, for each node, tool and model."""
        run = await self._find(request.token, request.id)
        rows = await run.report()
        return RunReportResponse([RunReportRow(row.id, row.node, row.tool, row.model, dict(row.used)) for row in rows])

    async def extend(self, request: RunExtendRequest) -> DoneResponse:
        """Add to the quotas of a node, or move its end."""
        run = await self._find_owned(request.owner, request.id)
        await run.extend(request.more, ttl=None if request.ttl is UNSET else request.ttl)
        return DONE

    async def stop(self, request: RunStopRequest) -> DoneResponse:
        """Deny every later call of a node and of those below it."""
        await (await self._find_owned(request.owner, request.id)).stop(end_streams=request.end_streams)
        return DONE

    async def close(self, request: RunOwnerRequest) -> DoneResponse:
        """End a node."""
        run = await self._find_owned(request.owner, request.id)
        await run_async(run.end_flow(CLOSED), async_performer(run.clock))
        return DONE

    async def list(self) -> RunListResponse:
        """Return the runs of the store."""
        return RunListResponse([RunRow(*each) for each in await list_runs_async(self._store)])


async def _created(run: AsyncRun) -> RunCreateResponse:
    return RunCreateResponse(run.id, run.name, run.ends, await run.token(rights=run.rights), await run.owner_key())


def _usage(usage: NodeUsage) -> RunReadResponse:
    return RunReadResponse(
        usage.id,
        usage.name,
        usage.status,
        usage.ends,
        dict(usage.used),
        {name: RunLimitResponse(*limit) for name, limit in usage.limits.items()},
        dict(usage.carved),
        [_usage(child) for child in usage.children],
    )
