"""The requests and responses of runs (`tidegate.agents`): nodes of trees of agents, over HTTP and RESP."""

from typing import Annotated, ClassVar, Final

from msgspec import UNSET, Meta, UnsetType, field

from tidegate.service._api.requests import FieldSets, String, VerbRequest
from tidegate.service._api.responses import VerbResponse

MAX_RUN_TTL: Final = 366 * 86_400.0
MAX_ITEMS: Final = 64  # limits of a node, units of a cost, alternatives of a call, credits

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Amount = (
    Annotated[int, Meta(ge=0, le=2**53 - 1)]
    | Annotated[float, Meta(ge=0)]
    | Annotated[str, Meta(min_length=1, max_length=40)]
)
Amounts = Annotated[
    dict[str, Amount],
    Meta(max_length=MAX_ITEMS, description="Amounts by unit.", extra={"example": '{"usd": "0.01"}'}),
]
RunLimits = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=200)]],
    Meta(max_length=MAX_ITEMS, description="The limits of the node.", extra={"example": '["0.20/run unit=usd"]'}),
]
RunTtl = Annotated[float, Meta(gt=0, le=MAX_RUN_TTL, description="Seconds until the node ends.")]
TokenField = Annotated[String, Meta(max_length=4096, description="A token of the node.")]
OwnerField = Annotated[String, Meta(max_length=4096, description="The key of the creator of the node.")]
RunIdField = Annotated[
    str,
    Meta(min_length=1, max_length=400, description="The id of the node, instead of a token: needs the admin token."),
]
CreditNames = Annotated[list[Name], Meta(max_length=MAX_ITEMS, description="Credits that pay when nothing is left.")]
Repeats = Annotated[int, Meta(ge=1, le=1_000_000, description="How often the same request may be made.")]


class RunNodeRequest(VerbRequest):
    """A request that creates a node."""

    name: Name
    limits: RunLimits = field(default_factory=list)
    ttl: RunTtl | UnsetType = UNSET
    credits: CreditNames = field(default_factory=list)
    max_repeats: Repeats | UnsetType = UNSET

    @property
    def node_ttl(self) -> float | None:
        """How long the node lives; None: the default."""
        return None if self.ttl is UNSET else self.ttl

    @property
    def repeats(self) -> int | None:
        """How often the same request may be made; None: as often as one likes."""
        return None if self.max_repeats is UNSET else self.max_repeats


class RunCreateRequest(RunNodeRequest):
    """A request that creates the root of a tree; one that names credits needs the admin token."""

    @property
    def needs_admin(self) -> bool:
        """Whether it needs the admin token."""
        return bool(self.credits)


class RunChildRequest(RunNodeRequest, kw_only=True):
    """A request that creates a node below another one."""

    token: TokenField
    carve: Amounts | UnsetType = UNSET


class RunReadRequest(VerbRequest):
    """A request about a node, by a token with the right to read, or by its id."""

    ALTERNATIVES: ClassVar[FieldSets] = (("token",), ("id",))

    token: TokenField | UnsetType = UNSET
    id: RunIdField | UnsetType = UNSET

    @property
    def needs_admin(self) -> bool:
        """Whether it needs the admin token."""
        return self.id is not UNSET


class RunOwnerRequest(VerbRequest):
    """A request that changes a node, by the key of its creator, or by its id."""

    ALTERNATIVES: ClassVar[FieldSets] = (("owner",), ("id",))

    owner: OwnerField | UnsetType = UNSET
    id: RunIdField | UnsetType = UNSET

    @property
    def needs_admin(self) -> bool:
        """Whether it needs the admin token."""
        return self.id is not UNSET


class RunStopRequest(RunOwnerRequest):
    """A request that stops a node."""

    end_streams: Annotated[bool, Meta(description="End responses that an egress gateway is passing on, too.")] = False


class RunExtendRequest(RunOwnerRequest):
    """A request that adds to quotas, or moves the end."""

    more: Amounts = field(default_factory=dict)
    ttl: RunTtl | UnsetType = UNSET


class RunChargeRequest(VerbRequest, kw_only=True):
    """A request that charges a call whose cost is known, such as that of a tool."""

    token: TokenField
    cost: Annotated[int, Meta(ge=0, le=2**53 - 1)] | Amounts = 1
    alternatives: Annotated[dict[Name, Amounts], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    request: Annotated[str, Meta(description="What is sent, for max_repeats.")] = ""


class RunCreateResponse(VerbResponse):
    """A node that was created."""

    id: str
    name: Annotated[str, Meta(description="The names from the root to the node.")]
    ends: Annotated[float, Meta(description="Seconds since 1970.")]
    token: Annotated[str, Meta(description="Charges, creates children, reads, as the token of its parent.")]
    owner: Annotated[str, Meta(description="The key of the creator: it also stops and extends the node. Keep it.")]


class RunLimitResponse(VerbResponse):
    """How much of one limit a node has used."""

    unit: str
    quota: int
    used: int
    remaining: int


class RunReadResponse(VerbResponse):
    """What a node and those below it have used."""

    id: str
    name: str
    status: Annotated[str, Meta(description="open, stopped, closed or ended.")]
    ends: float
    used: dict[str, int]
    limits: dict[str, RunLimitResponse]
    carved: dict[str, int]
    children: list["RunReadResponse"]


class RunChargeResponse(VerbResponse):
    """Whether a call was charged; if it was denied, by which node and limit, and what is left where."""

    allowed: bool
    alternative: Annotated[str, Meta(description="The name of what was charged.")] = ""
    node: str = ""
    limit: str = ""
    needed: int = 0
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    retry_after: Annotated[float | None, Meta(description="Seconds; null: never.")] = None
    detail: str = ""


class RunRow(VerbResponse):
    """One run of the list."""

    id: str
    name: str


class RunListResponse(VerbResponse):
    """The runs of the store."""

    runs: list[RunRow]


class RunReportRow(VerbResponse):
    """What the calls of one node used, without its children, for one tool or model."""

    id: str
    node: str
    tool: str
    model: str
    used: dict[str, int]


class RunReportResponse(VerbResponse):
    """What was used below a node, as rows that add up."""

    rows: list[RunReportRow]
