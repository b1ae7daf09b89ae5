"""The verbs of the service, in one table. HTTP, OpenAPI, both clients, the command line and tests of the docs read it.

A new verb is one entry in VERBS and one method of the same name in `http.verbs.Verbs`. The method gets the request
and, if the verb is idempotent, the call, or, if it is audited, the origin; it returns the response. A verb without a
request is a GET and gets neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from tidegate.service._api.decoding import RequestDecoder
from tidegate.service._api.requests import (
    AcquireRequest,
    AuditedRequest,
    BatchRequest,
    BlockRequest,
    CancelRequest,
    CommitRequest,
    CostRequest,
    LeaseRequest,
    PeekRequest,
    ReserveRequest,
    TargetRequest,
    VerbRequest,
)
from tidegate.service._api.responses import (
    AcquireResponse,
    AuditResponse,
    BatchResponse,
    BlockResponse,
    BlocksResponse,
    DecisionResponse,
    DoneResponse,
    LeaseResponse,
    PoliciesInfo,
    ReserveResponse,
    UsageResponse,
)
from tidegate.service._api.run_requests import (
    RunChargeRequest,
    RunChargeResponse,
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
from tidegate.service._decisions.policy_limiters import MAX_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable

Q = TypeVar("Q", bound=VerbRequest)
R = TypeVar("R")


@dataclass(frozen=True)
class ServiceVerb(Generic[Q, R]):
    """A verb of the service."""

    name: str
    summary: str
    request: type[Q] | None  # None: a GET without parameters
    response: type[R]
    admin: bool = False  # needs the admin token
    idempotent: bool = False  # accepts an Idempotency-Key, so that a client can repeat it
    audited: bool = False  # recorded in the audit log
    guarded: bool = False  # a request with an id, or with credits, needs the admin token
    waits: bool = False  # may wait for a permit: is timed separately, and bounded in number

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.request is None else "POST"

    @property
    def path(self) -> str:
        """The path of the URL."""
        return f"/v1/{self.name.replace('_', '/')}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a request."""
        return () if self.request is None else self.request.__struct_fields__

    @cached_property
    def decode(self) -> Callable[[bytes], Q]:
        """The function that decodes a request; it raises BadFieldError."""
        if self.request is None:
            raise TypeError(f"{self.name} has no request")
        return RequestDecoder(self.request).decode

    @cached_property
    def decode_response(self) -> Callable[[bytes], R]:
        """The function that decodes a response; it raises msgspec.DecodeError."""
        return msgspec.json.Decoder(self.response).decode


ACQUIRE: Final = ServiceVerb(
    "acquire", "Take permits, waiting if requested.",
    AcquireRequest, AcquireResponse, idempotent=True, waits=True,
)  # fmt: skip
PEEK: Final = ServiceVerb(
    "peek", "Return the decision that acquire would return, without changing anything.", PeekRequest, DecisionResponse
)
RESERVE: Final = ServiceVerb(
    "reserve", "Charge an estimate. The response has the id that settles it.",
    ReserveRequest, ReserveResponse, idempotent=True, waits=True,
)  # fmt: skip
LEASE: Final = ServiceVerb(
    "lease", "Take permits in advance, to use for a while without further requests.",
    LeaseRequest, LeaseResponse, idempotent=True,
)  # fmt: skip
COMMIT: Final = ServiceVerb(
    "commit", "Settle a reservation with its actual cost.", CommitRequest, DoneResponse, idempotent=True
)
CANCEL: Final = ServiceVerb(
    "cancel", "Cancel a reservation and refund its estimate.", CancelRequest, DoneResponse, idempotent=True
)
RELEASE: Final = ServiceVerb(
    "release", "Release slots of concurrency limits.", CostRequest, DoneResponse, idempotent=True
)
BATCH: Final = ServiceVerb(
    "batch", f"Decide on up to {MAX_BATCH} asks, each independently.", BatchRequest, BatchResponse, idempotent=True
)
USAGE: Final = ServiceVerb("usage", "Return how much of each limit a key has used.", TargetRequest, UsageResponse)
REFUND: Final = ServiceVerb(
    "refund", "Refund the most recently charged permits of a key. Needs the admin token.",
    CostRequest, DoneResponse, admin=True, idempotent=True,
)  # fmt: skip
RESET: Final = ServiceVerb(
    "reset", "Delete the state of a key. Needs the admin token.",
    AuditedRequest, DoneResponse, admin=True, audited=True,
)  # fmt: skip
BLOCK: Final = ServiceVerb(
    "block", "Deny a key for some time, whatever its limits. Needs the admin token.",
    BlockRequest, BlockResponse, admin=True, audited=True,
)  # fmt: skip
UNBLOCK: Final = ServiceVerb(
    "unblock", "Remove the block of a key. Needs the admin token.",
    AuditedRequest, DoneResponse, admin=True, audited=True,
)  # fmt: skip
BLOCKS: Final[ServiceVerb[VerbRequest, BlocksResponse]] = ServiceVerb(
    "blocks", "List the blocks. Needs the admin token.", None, BlocksResponse, admin=True
)
AUDIT: Final[ServiceVerb[VerbRequest, AuditResponse]] = ServiceVerb(
    "audit", "List who reset, blocked or unblocked a key. Needs the admin token.", None, AuditResponse, admin=True
)
POLICIES: Final[ServiceVerb[VerbRequest, PoliciesInfo]] = ServiceVerb(
    "policies", "List the policies.", None, PoliciesInfo
)
RUNS: Final[ServiceVerb[VerbRequest, RunListResponse]] = ServiceVerb(
    "runs", "List the runs of the store. Needs the admin token.", None, RunListResponse, admin=True
)
RUNS_CREATE: Final = ServiceVerb(
    "runs_create", "Create a run: the root of a tree of agents.", RunCreateRequest, RunCreateResponse, guarded=True
)
RUNS_CHILD: Final = ServiceVerb(
    "runs_child", "Create a node below another one.", RunChildRequest, RunCreateResponse
)  # fmt: skip
RUNS_CHARGE: Final = ServiceVerb(
    "runs_charge", "Charge a node and all nodes above it.", RunChargeRequest, RunChargeResponse
)
RUNS_READ: Final = ServiceVerb(
    "runs_read", "Return what a node and those below it have used.", RunReadRequest, RunReadResponse, guarded=True
)
RUNS_REPORT: Final = ServiceVerb(
    "runs_report", "Return what was used, for each node, tool and model.",
    RunReadRequest, RunReportResponse, guarded=True,
)  # fmt: skip
RUNS_EXTEND: Final = ServiceVerb(
    "runs_extend", "Add to the quotas of a node, or move its end.", RunExtendRequest, DoneResponse, guarded=True
)
RUNS_STOP: Final = ServiceVerb(
    "runs_stop", "Deny every later call of a node and of those below it.", RunStopRequest, DoneResponse, guarded=True
)
RUNS_CLOSE: Final = ServiceVerb(
    "runs_close", "End a node, and return what its carve-outs have left.", RunOwnerRequest, DoneResponse, guarded=True
)

VERBS: Final[dict[str, ServiceVerb[Any, Any]]] = {
    verb.name: verb
    for verb in (
        ACQUIRE, PEEK, RESERVE, LEASE, COMMIT, CANCEL, RELEASE, BATCH, USAGE, REFUND, RESET, BLOCK, UNBLOCK, BLOCKS,
        AUDIT, POLICIES, RUNS, RUNS_CREATE, RUNS_CHILD, RUNS_CHARGE, RUNS_READ, RUNS_REPORT,
        RUNS_EXTEND, RUNS_STOP, RUNS_CLOSE,
    )
}  # fmt: skip
