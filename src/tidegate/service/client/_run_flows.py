"""The methods of both clients for runs (`tidegate.agents`), as flows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from tidegate.agents._errors import RunDenied, no_decision
from tidegate.core._algorithms import NEVER
from tidegate.core._bounds import SECOND
from tidegate.service._api import verbs
from tidegate.service._api.run_requests import (
    RunChargeRequest,
    RunChildRequest,
    RunCreateRequest,
    RunCreateResponse,
    RunExtendRequest,
    RunListResponse,
    RunOwnerRequest,
    RunReadRequest,
    RunReadResponse,
    RunReportResponse,
    RunStopRequest,
)
from tidegate.service.client._protocol import ServiceRequest, verb_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate._runtime.flow import Flow
    from tidegate.service._api.run_requests import RunChargeResponse

    ClientFlow = Flow[ServiceRequest[Any], "R"]


R = TypeVar("R")


class RunFlows:
    """Creates, charges, reads, extends and ends nodes of runs in the store of the service."""

    def runs_create_flow(
        self,
        name: str,
        limits: Sequence[str] = (),
        ttl: float | None = None,
        credits: Sequence[str] = (),  # noqa: A002 - as in the request
        max_repeats: int | None = None,
    ) -> ClientFlow[RunCreateResponse]:
        """Create a run: the root of a tree of agents. The response has its token, and the key of its creator."""
        body = RunCreateRequest(name=name, **_node(limits, ttl, credits, max_repeats))
        created: RunCreateResponse = yield verb_request(verbs.RUNS_CREATE, body)
        return created

    def runs_child_flow(
        self,
        token: str,
        name: str,
        limits: Sequence[str] = (),
        ttl: float | None = None,
        carve: Mapping[str, int | float | str] | None = None,
        credits: Sequence[str] = (),  # noqa: A002 - as in the request
        max_repeats: int | None = None,
    ) -> ClientFlow[RunCreateResponse]:
        """Create a node below the node of a token."""
        body = RunChildRequest(
            token=token,
            name=name,
            carve=UNSET if carve is None else dict(carve),
            **_node(limits, ttl, credits, max_repeats),
        )
        created: RunCreateResponse = yield verb_request(verbs.RUNS_CHILD, body)
        return created

    def runs_charge_flow(
        self,
        token: str,
        cost: int | Mapping[str, int | float | str] = 1,
        alternatives: Mapping[str, Mapping[str, int | float | str]] | None = None,
        request: str = "",
    ) -> ClientFlow[RunChargeResponse]:
        """Charge a call whose cost is known, or the first of some alternatives that fits; raises RunDenied."""
        body = RunChargeRequest(
            token=token,
            cost=cost if isinstance(cost, int) else dict(cost),
            alternatives={name: dict(each) for name, each in (alternatives or {}).items()},
            request=request,
        )
        found: RunChargeResponse = yield verb_request(verbs.RUNS_CHARGE, body)
        if not found.allowed:
            retry = NEVER if found.retry_after is None else round(found.retry_after * SECOND)
            raise RunDenied(found.detail, no_decision(0, retry), found.node, found.limit, found.left)
        return found

    def runs_read_flow(
        self,
        token: str | None = None,
        id: str | None = None,  # noqa: A002 - as in the request
    ) -> ClientFlow[RunReadResponse]:
        """Return what a node and those below it have used, by a token, or, with the admin token, by its id."""
        body = RunReadRequest(token=UNSET if token is None else token, id=UNSET if id is None else id)
        found: RunReadResponse = yield verb_request(verbs.RUNS_READ, body)
        return found

    def runs_report_flow(
        self,
        token: str | None = None,
        id: str | None = None,  # noqa: A002 - as in the request
    ) -> ClientFlow[RunReportResponse]:
        """Return what was used, for each node, tool and model, by a token, or by the id of a node."""
        body = RunReadRequest(token=UNSET if token is None else token, id=UNSET if id is None else id)
        found: RunReportResponse = yield verb_request(verbs.RUNS_REPORT, body)
        return found

    def runs_extend_flow(
        self,
        owner: str | None = None,
        more: Mapping[str, int | float | str] | None = None,
        ttl: float | None = None,
        id: str | None = None,  # noqa: A002 - as in the request
    ) -> ClientFlow[None]:
        """Add to the quotas of a node, or move its end: with the key of its creator, or by its id."""
        body = RunExtendRequest(more=dict(more or {}), ttl=UNSET if ttl is None else ttl, **_owned(owner, id))
        yield verb_request(verbs.RUNS_EXTEND, body)

    def runs_stop_flow(
        self,
        owner: str | None = None,
        id: str | None = None,  # noqa: A002 - as in the request
        *,
        end_streams: bool = False,
    ) -> ClientFlow[None]:
        """Deny every later call of a node and of those below it: with the key of its creator, or by its id.

        With `end_streams`, gateways also end the responses that they are passing on, within about a second.
        """
        yield verb_request(verbs.RUNS_STOP, RunStopRequest(end_streams=end_streams, **_owned(owner, id)))

    def runs_close_flow(
        self,
        owner: str | None = None,
        id: str | None = None,  # noqa: A002 - as in the request
    ) -> ClientFlow[None]:
        """End a node: with the key of its creator, or by its id."""
        yield verb_request(verbs.RUNS_CLOSE, RunOwnerRequest(**_owned(owner, id)))

    def runs_flow(self) -> ClientFlow[RunListResponse]:
        """List the runs of the store; needs the admin token."""
        found: RunListResponse = yield verb_request(verbs.RUNS)
        return found


def _node(limits: Sequence[str], ttl: float | None, paying: Sequence[str], max_repeats: int | None) -> dict[str, Any]:
    return {
        "limits": list(limits),
        "ttl": UNSET if ttl is None else ttl,
        "credits": list(paying),
        "max_repeats": UNSET if max_repeats is None else max_repeats,
    }


def _owned(owner: str | None, identifier: str | None) -> dict[str, Any]:
    return {"owner": UNSET if owner is None else owner, "id": UNSET if identifier is None else identifier}
