"""The public surface: modules without an underscore, types of their signatures, and what docs and examples import."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

from tests.cases import cases
from tests.docs.blocks import blocks_of
from tests.inbound.sites import django_site  # noqa: F401 - tidegate.inbound.drf needs the settings of Django
from tests.project.public_surface import is_interior, modules, public_modules, public_signatures, resolve
from tidegate.budget import BudgetOptions, BudgetSettings
from tidegate.outbound import Gate, GateOptions, RequestKeywords
from tidegate.outbound._quota.exchange import RequestOptions
from tidegate.outbound.sources import SourceRow
from tidegate.outbound.sources._ledger import SourceRecord

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))

# ---- imports of the documentation ------------------------------------------------------------------------------------


def imports_of(tree):
    """Yield each module and name of the package that a program imports; the name is None for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def wrong_imports(tree):
    public = public_modules()
    return [
        f"{module}.{name}" if name else module
        for module, name in imports_of(tree)
        if module.partition(".")[0] == "tidegate"
        and (module not in public or (name is not None and name not in public[module]))
    ]


def parse(code):
    return compile(code, "<example>", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@cases("page", PAGES)
def test_a_page_imports_only_public_names(page):
    blocks = [block for block in blocks_of(page) if block.label == "python"]
    assert [(block.line, wrong) for block in blocks if (wrong := wrong_imports(parse(block.code)))] == []


@cases("example", EXAMPLES)
def test_an_example_imports_only_public_names(example):
    assert wrong_imports(ast.parse(example.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from tidegate import Limiter, Store", []),
        ("import tidegate.inbound.asgi", []),
        ("from tidegate import Limitter", ["tidegate.Limitter"]),
        ("from tidegate._limiter.limiter import Limiter", ["tidegate._limiter.limiter.Limiter"]),
        ("from tidegate.inbound.asgi import find_template", ["tidegate.inbound.asgi.find_template"]),
        ("if 1:\n    import tidegate._limiter.waiting", ["tidegate._limiter.waiting"]),
    ],
)
def test_a_wrong_import_is_found(code, wrong):
    assert wrong_imports(ast.parse(code)) == wrong


# ---- __all__ ---------------------------------------------------------------------------------------------------------


SDK_MODULES = {  # whose packages only the environment of tests/recipes has
    *(f"tidegate.agents.{name}" for name in ("langchain", "openai_agents", "pydantic_ai")),
    "tidegate.outbound.scrapy",
}


def test_each_public_name_can_be_imported():
    for module in public_modules().keys() - SDK_MODULES:
        imported = importlib.import_module(module)
        assert [name for name in imported.__all__ if not hasattr(imported, name)] == []
        assert len(set(imported.__all__)) == len(imported.__all__)


NAMESPACES = {"tidegate.compat"}  # which has no names of its own


def test_a_module_without_an_underscore_has_public_names():
    public = {name for name in modules() if not is_interior(name)}
    assert public - public_modules().keys() == NAMESPACES


# ---- signatures ------------------------------------------------------------------------------------------------------

# Methods that only the package itself calls, though their class is public: a signature may use internal types.
INTERNAL = {
    "tidegate.agents._base_run.BaseRun.charge_flow": "called by what charges the current run",
    "tidegate.agents._reservation.BaseRunReservation.__init__": "made by `Run.reserve`",
    "tidegate.agents._reservation.BaseRunReservation.cancel_flow": "called by what charged the current run",
    "tidegate.agents._reservation.BaseRunReservation.commit_usage_flow": "called by what charged the current run",
    "tidegate.agents._base_run.BaseRun.ask_flow": "called after a denial",
    "tidegate.agents._base_run.BaseRun.end_flow": "called by the service and the command line",
    "tidegate.agents._credits.BaseCredits.node_flow": "called by runs",
    "tidegate.agents._errors.RunDenied.__init__": "raised by `Run.reserve`",
    "tidegate.budget._batch._Batch.__init__": "made by `TaskBudget.batch`",
    "tidegate.budget._settings.model.BudgetSettings.plan": "read by the budget",
    "tidegate.inbound._limiting.route_limit.RouteLimit.category": "set by the middleware",
    "tidegate.inbound._limiting.route_limit.RouteLimit.make_charge_flow": "called by the adapters of frameworks",
    "tidegate.inbound._limiting.route_limit.RouteLimit.own_request_limiter": "called by the adapters of frameworks",
    "tidegate.inbound._limiting.limited_call.FrameworkLimit.own_request_limiter": "called by the adapters",
    "tidegate.inbound._limiting.route_limit.RouteLimit.prepare_charge": "called by the middlewares and adapters",
    "tidegate.inbound._limiting.route_limit.RouteLimit.choose_key": "called by the decision",
    "tidegate.inbound._limiting.charges.UnrecordedOwner.record": "called by the decision",
    "tidegate.inbound._limiting.charges.UnrecordedOwner.correct": "called by the settlement",
    "tidegate.inbound._limiting.route_limit.RouteLimit.request_limiter_for": "called by the adapters of frameworks",
    "tidegate.inbound._limiting.route_limit.RouteLimit.use": "called by `Limits.limit`",
    "tidegate.inbound._limiting.limited_call.LimitedBlock.__init__": "made by `limit.check`",
    "tidegate._limiter.limited._Limited.__init__": "made by `Limiter.limited`",
    "tidegate.outbound._adapters.httpx_common.AsyncTransport.__init__": "called by the transports of httpx and httpx2",
    "tidegate.outbound._adapters.httpx_common.SyncTransport.__init__": "called by the transports of httpx and httpx2",
    "tidegate.outbound._quota.gate._Gate.account_of": "called by the sources",
    "tidegate.outbound._quota.gate._Gate.accounts": "read by the dashboard",
    "tidegate.outbound._quota.gate.Gate.perform": "called by the driver of the gate's flows",
    "tidegate.outbound._quota.gate.AsyncGate.perform": "called by the driver of the gate's flows",
    "tidegate.outbound._quota.exchange.OutboundRequest.parsed": "set by the egress gateway",
    "tidegate.outbound._quota.gate._Gate.send_flow": "called by the adapters of HTTP clients",
    "tidegate.outbound._providers.provider.Provider.counting": "read from the file that `profile` names",
    "tidegate.outbound._providers.provider.Provider.profile": "read from the file that `profile` names",
    "tidegate.outbound._quota.pending_charge._PendingCharge.__init__": "made by `Gate.acquire`",
    "tidegate._limiter.reservation.BaseReservation.__init__": "made by `Limiter.reserve`",
    "tidegate._limiter.reservation.BaseReservation.cancel_flow": "called by other flows",
    "tidegate._limiter.reservation.BaseReservation.commit_flow": "called by other flows",
    "tidegate._limiter.reservation.BaseReservation.shrink_flow": "called by other flows",
    "tidegate.stores._lease.store.LeasedStore.specialize": "called by limiters",
    "tidegate.stores._lease.store.LeasedStore.send": "called by the renewal of leases",
    "tidegate.stores._lease.store.LeasedStore.send_async": "called by the renewal of leases",
    "tidegate.stores._memory.store.MemoryStore.specialize": "called by limiters",
    "tidegate.stores._redis.address.RedisAddress.hash_tag": "read from the URL",
    "tidegate.stores._redis.address.RedisAddress.kind": "read from the URL",
    "tidegate.swarm._limited_calls._LimitedCall.__init__": "made by `SwarmLimiter.limited`",
}
# Names of the types of ASGI and WSGI, which each framework defines again; they are spelled out in the module.
PROTOCOL_ALIASES = {"App", "Environ", "Receive", "Scope", "Send", "Start"}
# Documents of the service are typed with the service; its client mirrors its JSON.
SERVICE = "tidegate.service."
# Methods that SDKs call with objects of theirs; the SDKs are not installed here, or have no types.
SDKS = (*(f"{name}." for name in SDK_MODULES), "tidegate.inbound.mcp.", "tidegate.outbound.celery.")
UNTYPED_PACKAGES = ("tidegate.service.client.", *SDKS)
# Aliases that contain Any: the integers and arrays of a state mean something to its algorithm only; a flow yields calls
# to its driver; functions of a limit receive the request of any framework; a report is JSON.
OPAQUE_ALIASES = PROTOCOL_ALIASES | {"CallFlow", "FrameworkRequest", "Report", "State"}
# Internal methods that accept whatever their callers return.
INTERNAL_WITH_ANY = [
    "tidegate.budget._batch._Batch.__init__",
    "tidegate.outbound._quota.gate._Gate.run",
    "tidegate.outbound._quota.gate._Gate.send_flow",
    "tidegate.outbound._quota.pending_charge._PendingCharge.__init__",
]
# A coroutine or generator yields to its driver: only its result means something to a caller.
WITHOUT_YIELD = {"AsyncGenerator", "Coroutine", "Generator"}


def user_signatures():
    return {
        name: signature
        for name, signature in public_signatures().items()
        if name not in INTERNAL and not name.startswith((SERVICE, *SDKS))
    }


def names_in(annotation):
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def is_type_variable(statement):
    called = getattr(getattr(statement, "value", None), "func", None)
    return isinstance(called, ast.Name) and called.id in {"TypeVar", "ParamSpec"}


def public_definitions():
    found = set()
    for module, names in public_modules().items():
        for name in names:
            home = resolve(module, name)
            if home is not None:
                found.add((home[0].name, name))
    return found


def test_each_type_of_a_public_signature_is_public():
    public = public_definitions()
    hidden = {
        f"{home.name}.{used} in {name}"
        for name, signature in user_signatures().items()
        for annotation in signature.annotations
        for used in names_in(annotation)
        if used not in PROTOCOL_ALIASES and (found := resolve(signature.module.name, used)) is not None
        for home, definition in [found]
        if not is_type_variable(definition) and (home.name, getattr(definition, "name", used)) not in public
    }
    assert sorted(hidden) == []


def has_any(annotation):
    """Return whether an annotation contains Any, except for what a coroutine or generator yields."""
    if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", None) in WITHOUT_YIELD:
        return has_any(annotation.slice.elts[-1])
    if isinstance(annotation, ast.Name):
        return annotation.id == "Any"
    return any(map(has_any, ast.iter_child_nodes(annotation)))


def hides_any(module, annotation):
    """Return whether an annotation contains Any itself, or an alias of the package that does."""
    if has_any(annotation):
        return True
    aliases = (resolve(module, name) for name in names_in(annotation) if name not in OPAQUE_ALIASES)
    return any(
        hides_any(found[0].name, found[1].value)
        for found in aliases
        if found is not None and isinstance(found[1], ast.Assign) and not isinstance(found[1].value, ast.Call)
    )


def test_no_public_signature_has_any():
    """Methods that only the package calls may use internal types, but no Any either."""
    found = {
        name
        for name, signature in public_signatures().items()
        if not name.startswith(UNTYPED_PACKAGES)
        and any(hides_any(signature.module.name, annotation) for annotation in signature.annotations)
    }
    assert sorted(found) == INTERNAL_WITH_ANY


@pytest.mark.parametrize(
    ("module", "annotation", "hidden"),
    [
        ("tidegate.stores._lease.manager", "Callable[[Any], int]", True),
        ("tidegate.stores._lease.manager", "list[LeaseFlow]", True),
        ("tidegate.stores._lease.manager", "StoreRequest | State", False),
        ("tidegate.stores._base", "TryAcquire[T]", False),
    ],
)
def test_an_alias_that_hides_any_is_found(module, annotation, hidden):
    assert hides_any(module, ast.parse(annotation).body[0].value) is hidden


def test_keyword_options_are_typed():
    found = {
        name: ast.unparse(signature.options)
        for name, signature in public_signatures().items()
        if signature.options is not None and not name.startswith(UNTYPED_PACKAGES)
    }
    assert found, "none at all: this test does not find them"
    assert {name: text for name, text in found.items() if not text.startswith(("Unpack[", "P.kwargs"))} == {}


def test_internal_methods_exist():
    assert sorted(INTERNAL.keys() - public_signatures().keys()) == []


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (BudgetOptions, {field.name for field in dataclasses.fields(BudgetSettings)}),
        (GateOptions, set(inspect.signature(Gate).parameters) - {"providers", "store"}),
        (RequestKeywords, set(RequestOptions._fields) - {"sender"}),  # which only the egress gateway sets
        (SourceRow, {*SourceRecord._fields, "schedule", "priority", "url", "provider", "skip_reason"}),
    ],
)
def test_typed_keywords_are_those_of_what_they_describe(options, fields):
    assert set(options.__annotations__) == fields


def test_modules_are_found():
    assert {"tidegate", "tidegate._limiter.limiter", "tidegate.stores._redis.store"} <= modules().keys()
