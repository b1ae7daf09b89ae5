"""docs/reference/documents.md has every name of the five documents, and every name of tidegate on it exists.

The documents are not part of the repository: NAMES lists the names that they define.
"""

import ast
import importlib
import inspect
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from tests.cases import cases
from tests.docs.links import LINK, problem_of
from tidegate._cli import build_parser
from tidegate._cli.file_kinds import KINDS
from tidegate.budget import TaskBudget
from tidegate.budget._settings.environment import CONFIG_VARIABLE, VARIABLES
from tidegate.budget.alerts._metrics import read_metrics
from tidegate.inbound._rules.model import ADMIN_PATH
from tidegate.outbound import Gate, Providers
from tidegate.service._api.verbs import VERBS
from tidegate.service._http.openapi import document

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "documents.md"
HEADER = ["name in the document", "tidegate", "page", "difference and reason"]

NAMES = {
    "Rate Limiter Design": """
        RateLimiter Acquire TryAcquire Release SetCapacity AnnounceReduced GetCapacity Close OnCapacityChange Capacity
        Resource Available Total Window InFlight CapacityUpdate AgentID NewCapacity Reason Timestamp MemoryLimiter
        NewMemoryLimiter DistributedLimiter NewDistributedLimiter DistributedConfig Bus ReduceFactor RecoveryInterval
        RecoveryFactor MaxRecovery bus.MessageBus ratelimit.capacity attemptRecovery lastReduction sync.Cond sync.Mutex
        ErrClosed ErrResourceUnknown ErrCapacityExhausted ErrInvalidCapacity ErrInvalidWindow ErrInvalidConfig
        context.Canceled context.DeadlineExceeded ratelimit.go memory.go memory_test.go distributed.go
        distributed_test.go doc.go
    """,
    "Multi-Tier Rate Limiting System Design": """
        RateLimiter db_path check_all_limits RateLimitResult record_completed_tasks get_current_usage Usage
        reset_expired_windows RATE_LIMIT_PER_MINUTE RATE_LIMIT_PER_HOUR RATE_LIMIT_PER_DAY RATE_LIMIT_PER_WEEK
        RATE_LIMIT_PER_MONTH RATE_LIMIT_STORAGE_PATH RATE_LIMIT_ENABLED RATE_LIMIT_STRATEGY CONCURRENCY_LIMIT
        rate_limits time_period current_count window_start window_end last_updated task_completions completed_at
        task_type task_id idx_task_completions_timestamp idx_rate_limits_period TaskScheduler poll_and_process_tasks
        settings.py rate_limit_current_usage rate_limit_max_allowed rate_limit_exceeded_total rate_limit_check_duration
        rate_limit_check_duration_seconds rate_limit_window_reset_seconds aiosqlite
    """,
    "RateLimiter": """
        RateLimiter RateLimiter.Acquire api_name domain limit period api_key fmp.yaml alphavantage.yaml yahoo.yaml
        start --provider --provider-dir add name url Receiver Scheduler Worker RateLimitExceeded counter window_start
        rate_limiter_state request_count updated_at Ns Nm Nh Nd
    """,
    "Specification: API Rate Limiting": """
        IP Category Window Limit expensive moderately read very_expensive X-RateLimit-Limit X-RateLimit-Remaining
        X-RateLimit-Reset Retry-After 429 config.yaml rate_limiting enabled categories limit window_minutes
        cleanup_interval_minutes max_entries unknown /api/admin/rate-limit-stats total_entries by_category INFO WARN
        ERROR remote_address X-Forwarded-For
    """,
    "Design: API Rate Limiting": """
        RateLimiter @limits cleanup_task check_limit record_request get_headers should_rate_limit? ApiController
        before_each RateLimitInfo request_count window_start within_window? expired? RateLimitConfig DEFAULT_LIMITS
        WINDOW_SIZES CLEANUP_INTERVAL MAX_ENTRIES RateLimiter.instance allowed remaining reset_at window_key
        cleanup_loop cleanup_expired_entries stats rate_limit_requests rate_limit_stats RateLimitStatsResponse
        Retry-After src/rate_limiter.cr src/dtos/rate_limit_stats_dto.cr src/controllers/api_controller.cr
        src/config.cr
    """,
}


class Row(NamedTuple):
    document: str
    line: int
    name: str
    ours: str
    links: str
    difference: str


def rows_of(text):
    """The rows of all tables with HEADER, under the heading with the name of their document."""
    heading, in_table = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif cells == HEADER:
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and not cells[0].startswith("---"):
            assert len(cells) == len(HEADER), f"line {number}: {len(cells)} cells"
            yield Row(heading, number, *cells)


TEXT = PAGE.read_text(encoding="utf-8")
ROWS = list(rows_of(TEXT))
DIFFERENCE = re.compile(r"\b(but|except|instead|differs|only the first|only from)\b")


def test_no_row_says_same_and_then_names_a_difference():
    assert [row.line for row in ROWS if row.difference.startswith("same") and DIFFERENCE.search(row.difference)] == []


def spans(text):
    return re.findall(r"`([^`]+)`", text)


SHARED = re.compile(r"(DEBUG|INFO|WARNING|ERROR) |[a-z_]+: ")  # a log line, or a setting with its value


def test_no_log_line_or_setting_is_the_same_in_one_row_and_different_in_another():
    shared = [(span, row) for row in ROWS for span in spans(row.ours) if SHARED.match(span)]
    differing = {span for span, row in shared if row.difference.startswith("different")}
    assert [row.line for span, row in shared if span in differing and row.difference.startswith("same")] == []


OURS = sorted({(span, row.line) for row in ROWS for span in spans(row.ours)}, key=lambda pair: (pair[1], pair[0]))
DOTTED = re.compile(r"(tidegate(?:\.\w+)+)(?:\(([^)]*)\))?")


def resolve(path):
    """Import a dotted name: a module, a name in it, an attribute or a field of a class."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError as error:
            if error.name and not path.startswith(error.name):
                raise
            continue
        for word in words[length:]:
            if word in getattr(found, "__dataclass_fields__", ()) and not hasattr(found, word):
                return None
            found = getattr(found, word, None) or type_of_attribute(found, word)
        return found
    raise ModuleNotFoundError(path)


def type_of_attribute(owner, name):
    """The type of an attribute that the constructor of a class sets, as it annotates it."""
    constructor = getattr(owner, "__init__", None)
    source = inspect.getsource(constructor) if inspect.isfunction(constructor) and not is_dataclass(owner) else ""
    annotated = re.search(rf"self\.{name}: (\w+) =", source)
    if annotated is None:
        raise AttributeError(f"{owner} has no {name}")
    return getattr(inspect.getmodule(owner), annotated[1])


def check_dotted(path, arguments):
    found = resolve(path)
    if arguments:
        wanted = {argument.strip() for argument in arguments.split(",")}
        assert wanted <= inspect.signature(found).parameters.keys()


def check_command(span):
    arguments = span.split()[1:]
    parser = build_parser(arguments)
    assert parser.parse_args(arguments).command == arguments[0]


def check_endpoint(method, path, fields):
    if path != ADMIN_PATH:
        assert method.lower() in json.loads(document())["paths"][path]
    if fields:
        assert json.loads(fields).keys() <= set(VERBS[path.removeprefix("/v1/").replace("/", "_")].fields)


def check_query(span, folder):
    if "FROM tidegate." in span:
        return  # test_each_query_of_a_view_works_on_postgresql
    with TaskBudget(folder / "limits.db", per_minute=5) as budget:
        budget.record_completed_tasks(1)
        with closing(sqlite3.connect(folder / "limits.db")) as connection:
            assert connection.execute(span).fetchall()


@cache
def metrics():
    with TaskBudget("memory://", per_minute=5) as budget:
        return {family.name for family in read_metrics(budget.operations)}


@cache
def constants():
    """Every string in the source, with the parts of f-strings."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def check_log_line(text):
    """Check that the source has the words of the line between its values (words in capitals, in brackets, numbers)."""
    fixed = [part.strip(" :,;()%") for part in re.split(r"\b[A-Z]+\b|\([^)]*\)|…", text)]
    fixed = [part for part in fixed if re.search(r"[a-z]{2}", part)]
    assert fixed
    for part in fixed:
        assert any(part in constant for constant in constants()), f"no message contains {part!r}"


@cache
def settings():
    """The names of all settings in files, by the JSON schemas of the files."""

    def names(schema):
        if isinstance(schema, dict):
            yield from schema.get("properties", {})
            for value in schema.values():
                yield from names(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from names(value)

    return {name for kind in KINDS.values() for name in names(kind.schema())}


def check(span, folder):
    """Check that a name in the second column exists."""
    if dotted := DOTTED.fullmatch(span):
        return check_dotted(*dotted.groups())
    if span.startswith("tidegate "):
        return check_command(span)
    if endpoint := re.fullmatch(r"(GET|POST) (/\S+)(?: (\{.*\}))?", span):
        return check_endpoint(*endpoint.groups())
    if span.startswith("SELECT "):
        return check_query(span, folder)
    if line := re.fullmatch(r"(?:DEBUG|INFO|WARNING|ERROR) (.+)", span):
        return check_log_line(line[1])
    if re.fullmatch(r"[A-Z_]+", span):
        assert span in {*VARIABLES.values(), CONFIG_VARIABLE}
    elif span.startswith("rate_limit_"):
        assert span in metrics()
    elif setting := re.fullmatch(r"(\w+): .+", span):
        assert setting[1] in settings()
    elif re.fullmatch(r"(deploy|docs|examples|tests)/\S+", span):
        assert (ROOT / span).exists()
    else:
        assert span in constants()  # a header, an algorithm, a metric, a message
    return None


@cases(("span", "line"), OURS)
def test_each_name_of_tidegate_exists(span, line, tmp_path_factory):
    check(span, tmp_path_factory.mktemp("name"))


VIEW_QUERIES = {span: row for row in ROWS for span in spans(row.ours) if re.match(r"SELECT (?!.*sqlite_master)", span)}


def test_each_query_of_a_view_works_on_postgresql(postgres_url):
    with TaskBudget(postgres_url, per_minute=5) as budget:
        budget.record_completed_tasks(1)
    providers = Providers.of({"domain": "fmp.example", "limit": 300, "period": "1m"})
    with closing(Gate(providers, postgres_url)) as gate:
        assert gate.try_acquire("fmp.example")
    queries = [span for span in VIEW_QUERIES if "FROM tidegate." in span]
    assert sorted(span.replace("FROM tidegate.", "FROM ") for span in queries) == sorted(VIEW_QUERIES.keys() - queries)
    with psycopg.connect(postgres_url) as connection:
        for span in queries:
            assert connection.execute(span).fetchall(), span


def test_the_page_names_only_public_names():
    assert [span for span in spans(TEXT) if re.match(r"tidegate\.(\w+\.)*_", span)] == []


def test_each_dotted_name_elsewhere_on_the_page_exists():
    for span in {span for span in spans(TEXT) if span.startswith("tidegate.")}:
        check_dotted(*DOTTED.fullmatch(span).groups())


@pytest.mark.parametrize(
    "span",
    [
        "tidegate.swarm.DistributedLimiter",
        "tidegate.swarm.SwarmLimiter(buss)",
        "tidegate.budget.RateLimitResult.nothing",
        "tidegate.inbound.asgi.RateLimitMiddleware.request_limiter.nothing",
        "tidegate.inbound.asgi.RateLimitMiddleware.nothing",
        "tidegate validate --kindd x",
        "GET /v1/acquire",
        'POST /v1/acquire {"providers": "fmp"}',
        "SELECT domain, count FROM rate_limiter_state",
        "INFO rate limiter started: categories NAMES",
        "RATE_LIMIT_PER_YEAR",
        "rate_limit_other_total",
        "max_entry: 1000",
        "docs/nothing.md",
        "X-RateLimit-Nothing",
    ],
)
def test_a_name_that_does_not_exist_is_found(span, tmp_path):
    with pytest.raises((AssertionError, AttributeError, KeyError, SystemExit, sqlite3.Error)):
        check(span, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_a_document_has_a_row(name):
    listed = "\n".join(row.name for row in ROWS if row.document == name)
    in_code = "\n".join(spans(listed))

    def is_listed(each):
        """A lower-case name may also be an ordinary word, so it counts in code only."""
        return re.search(rf"(?<![\w./-]){re.escape(each)}(?![\w-])", in_code if each.islower() else listed)

    assert [each for each in NAMES[name].split() if not is_listed(each)] == []


def test_each_table_belongs_to_a_document():
    assert list(dict.fromkeys(row.document for row in ROWS)) == list(NAMES)


@cases("row", ROWS)
def test_each_row_says_where_it_is_described_and_how_it_differs(row):
    targets = LINK.findall(row.links)
    assert targets
    assert [problem_of(PAGE, target) for target in targets] == [None] * len(targets)
    assert spans(row.ours)
    assert row.difference.startswith(("same", "different", "addition"))
    assert "because" in row.difference or not row.difference.startswith("different")
