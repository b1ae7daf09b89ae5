"""Writes the reference pages from the code: settings, metrics, header fields, log lines, JSON fields, errors, API.

    python tools/site_reference.py        # all but the API into docs/reference: `make reference`

Names, types, options, variables and messages come from the code. The meaning of a setting that has no help text in the
code comes from the table in the guide that describes it: a setting without such a row is an error. `make site` adds the
pages of the API, whose text mkdocstrings reads from the code.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.links import FENCE, anchor_of  # noqa: E402 - found in ROOT
from tests.project.public_surface import public_modules  # noqa: E402 - found in ROOT
from tidegate import errors  # noqa: E402 - after ROOT
from tidegate._cli import EXIT_CODES  # noqa: E402 - after ROOT
from tidegate._cli.file_kinds import KINDS  # noqa: E402 - after ROOT
from tidegate.budget._settings.environment import CONFIG_VARIABLE, FROM_FILES, VARIABLES  # noqa: E402 - after ROOT
from tidegate.budget._settings.model import SETTINGS  # noqa: E402 - after ROOT
from tidegate.egress import _messages as messages  # noqa: E402 - after ROOT
from tidegate.egress._settings import CALLER_FIELDS, EGRESS_FIELDS  # noqa: E402 - after ROOT
from tidegate.headers._dialects import DIALECTS, IETF, RETRY_AFTER, RETRY_AFTER_MS, X_RATELIMIT  # noqa: E402 - after ROOT
from tidegate.headers._servers import SERVERS  # noqa: E402 - after ROOT
from tidegate.inbound._rules.config import CATEGORY_FIELDS, SECTION_FIELDS  # noqa: E402 - after ROOT
from tidegate.outbound._providers.file import LIMIT_FIELDS, PROVIDER_FIELDS  # noqa: E402 - after ROOT
from tidegate.outbound._providers.pool_file import KEY_FIELDS, MEMBER_FIELDS, POOL_FIELDS  # noqa: E402 - after ROOT
from tidegate.outbound._providers.profile_file import PROFILE_FIELDS  # noqa: E402 - after ROOT
from tidegate.outbound.sources._source import SOURCE_FIELDS  # noqa: E402 - after ROOT
from tidegate.service._api.problems import KINDS as PROBLEM_KINDS  # noqa: E402 - after ROOT
from tidegate.service._api.problems import PROBLEM_PREFIX  # noqa: E402 - after ROOT
from tidegate.service._config.settings import (  # noqa: E402 - after ROOT
    ENVIRONMENT_PREFIX,
    OPTIONS,
    SECTIONS,
)
from tidegate.service._http.openapi import document  # noqa: E402 - after ROOT
from tidegate.stores._outage.open import OPTIONS as OUTAGE_OPTIONS  # noqa: E402 - after ROOT
from tidegate.stores._postgres.store import OPTIONS as POSTGRES_OPTIONS  # noqa: E402 - after ROOT
from tidegate.stores._redis.address import OPTIONS as REDIS_OPTIONS  # noqa: E402 - after ROOT
from tidegate.stores._registry import MEMORY_OPTIONS  # noqa: E402 - after ROOT
from tidegate.stores._sqlite.store import OPTIONS as SQLITE_OPTIONS  # noqa: E402 - after ROOT
from tools.make_monitoring import METRIC, metric_families  # noqa: E402 - found in ROOT
from tools.site_log_lines import LogLine, log_lines  # noqa: E402 - found in ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

DOCS: Final = ROOT / "docs"
TIERS_MEANING: Final = "maximum number of tasks per tier"
GENERATED: Final = "This page is generated from the code (`make reference`)."


# ---- tables of the guides --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a table in a guide."""

    names: tuple[str, ...]  # in backticks, in the first cell
    meaning: str
    default: str  # empty if the table does not say it
    anchor: str  # of the heading above the table


@cache
def rows_of(page: str, first: str) -> tuple[Row, ...]:
    """Return the rows of the tables of a page whose first header cell begins with `first`."""
    found: list[Row] = []
    header: list[str] = []
    anchor = ""
    for line in FENCE.sub("", (DOCS / page).read_text(encoding="utf-8")).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if line.startswith("#"):
            anchor = anchor_of(line.lstrip("# "))
        if not cells:
            header = []
        elif not header:
            header = cells
        elif header[0].startswith(first) and not cells[0].startswith("---"):
            column = header.index("meaning") if "meaning" in header else 1
            default = relocate(cells[header.index("default")], page) if "default" in header else ""
            # The table of a budget has variables in its first column, settings in its second.
            for cell in cells[: 2 if "variable" in header else 1]:
                names = tuple(each.partition("=")[0] for each in re.findall(r"`([^`]+)`", cell))
                found.append(Row(names, relocate(cells[column], page), default, anchor))
    return tuple(found)


def relocate(text: str, page: str) -> str:
    """Change the links of a cell so that they work in a page of reference/."""

    def change(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        place = posixpath.join(posixpath.dirname(page), path) if path else page
        return f"]({posixpath.relpath(place, 'reference')}{mark}{anchor})"

    return re.sub(r"\]\((?!https?:)([^()\s]+)\)", change, text)


def row_of(name: str, places: Sequence[tuple[str, str]]) -> tuple[str, Row]:
    """Return the page and the row that describe a setting."""
    for page, first in places:
        for row in rows_of(page, first):
            if name in row.names:
                return page, row
    pages = ", ".join(sorted({page for page, _ in places}))
    raise SystemExit(f"{pages}: no table describes the setting {name!r}")


def meaning_of(name: str, places: Sequence[tuple[str, str]]) -> str:
    """Return what the guides say about a setting, with a link."""
    page, row = row_of(name, places)
    text = part_of(row.meaning, "; ", row, name)
    guide = f"{posixpath.relpath(page, 'reference')}#{row.anchor}"
    return f"{'see the guide' if text == 'see above' else text} ([guide]({guide}))"


def default_of(name: str, places: Sequence[tuple[str, str]]) -> str:
    """Return the default that the guides name."""
    _, row = row_of(name, places)
    return part_of(row.default, ", ", row, name)


def part_of(text: str, separator: str, row: Row, name: str) -> str:
    """Return the part of a cell that is about one of several names."""
    parts = text.split(separator)
    return parts[row.names.index(name)] if len(row.names) == len(parts) else text


# ---- writing ---------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Return text as code in a table cell."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def plain(text: str) -> str:
    """Return text that contains no Markdown."""
    return re.sub(r"([|<>*\[\]])", r"\\\1", text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def type_of(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "enum" in schema:
        return " or ".join(code(str(value)) for value in schema["enum"])
    if "anyOf" in schema:
        words = (type_of(each) for each in schema["anyOf"])
        return " or ".join(dict.fromkeys(word for word in words if word))
    names = {"object": "mapping", "array": "list", "null": "null"}
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(names.get(kind, kind) for kind in kinds)


SECTION_CELLS: Final = {
    "policies": (
        f"{code('--policy NAME=LIMITS')}<br>{code('TIDEGATE_POLICIES')}",
        "policies by name; in the variable: `a=1/1s; b=5/1m`",
    ),
    "domains": ("", "trees of descriptors, for Envoy"),
}

# ---- settings --------------------------------------------------------------------------------------------------------


def service_settings() -> list[str]:
    """Describe the settings of the service."""
    rows = []
    for option in OPTIONS:
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        flag = "" if option.secret else option.flag
        names = "<br>".join(filter(None, (code(flag), code(variable))))
        label = option.link.partition("#")[0].rpartition("/")[2].removesuffix(".md")
        link = f" ([{label}]({option.link}))" if option.link else ""
        rows.append([code(option.name), type_of(dict(option.kind.schema)), names, plain(option.help) + link])
    rows += [[code(name), "mapping or list", *SECTION_CELLS[name]] for name in SECTIONS]
    return table(["setting", "type", "option, variable", "meaning"], rows)


class FileTable(NamedTuple):
    """The settings of one part of a file: the heading, the names, their schema, and the tables that describe them."""

    title: str
    names: Sequence[str]
    schema: dict[str, Any]
    places: tuple[tuple[str, str], ...]


def file_tables() -> Iterator[FileTable]:
    """Return the settings of all files except that of the service."""
    limits = ("concepts/limits.md", "attribute")
    provider = (("reference/outbound.md", "field"),)
    inbound = KINDS["inbound"].schema()["properties"]["rate_limiting"]["anyOf"][0]
    category = inbound["properties"]["categories"]["additionalProperties"]["anyOf"][0]
    egress = KINDS["egress"].schema()
    callers = egress["properties"]["callers"]["additionalProperties"]
    member = (("reference/money.md", "field of a member"), *provider)
    yield FileTable("Provider file", (*LIMIT_FIELDS, *PROVIDER_FIELDS), KINDS["provider"].schema(), provider)
    yield FileTable("Pool in a provider file", POOL_FIELDS, {}, (("reference/money.md", "field of `pool`"),))
    yield FileTable("Member of a pool", (*MEMBER_FIELDS, *KEY_FIELDS), {}, member)
    yield FileTable("Profile", PROFILE_FIELDS, {}, (("reference/outbound.md", "field of a profile"),))
    yield FileTable(
        "Source file", SOURCE_FIELDS, KINDS["source"].schema(), (("reference/sources.md", "field of a source"),)
    )
    yield FileTable(
        "Inbound file: `rate_limiting`",
        tuple(dict.fromkeys(SECTION_FIELDS)),
        inbound,
        (("reference/inbound.md", "in `rate"),),
    )
    places = (("reference/inbound.md", "in a category"), limits)
    yield FileTable("Inbound file: a category", tuple(dict.fromkeys(CATEGORY_FIELDS)), category, places)
    yield FileTable("Egress file", EGRESS_FIELDS, egress, (("reference/egress.md", "field of the egress"),))
    yield FileTable("Egress file: a caller", CALLER_FIELDS, callers, (("reference/egress.md", "field of a caller"),))


def store_tables() -> Iterator[FileTable]:
    """Return the options in the URLs of stores."""
    yield FileTable("Store URL: `memory://`", MEMORY_OPTIONS, {}, (("concepts/limits.md", "option"),))
    yield FileTable("Store URL: `sqlite:///`", SQLITE_OPTIONS, {}, (("reference/stores-sqlite.md", "option"),))
    yield FileTable("Store URL: `redis://`, `valkey://`", REDIS_OPTIONS, {}, (("reference/stores-redis.md", "option"),))
    yield FileTable("Store URL: `postgresql://`", POSTGRES_OPTIONS, {}, (("reference/stores-postgres.md", "option"),))
    yield FileTable("URL of every shared store", OUTAGE_OPTIONS, {}, (("concepts/store-outages.md", "in the URL"),))


def budget_settings() -> list[str]:
    """Describe the settings of a task budget: the names in the file, and the variables."""
    schema = KINDS["budget"].schema()["properties"]
    rows = []
    for name in schema:
        first = "per_minute" if name == "tiers" else name
        variable = VARIABLES.get(first, "")
        variables = [variable, f"{variable}_FILE"] if name in FROM_FILES else [variable]
        if name == "tiers":
            variables = [VARIABLES[each] for each in VARIABLES if each.startswith("per_")]
        meaning = TIERS_MEANING if name == "tiers" else SETTINGS[name].summary
        link = "([guide](budgets.md#settings))"
        rows.append(
            [code(name), type_of(schema[name]), " ".join(map(code, filter(None, variables))), f"{meaning} {link}"]
        )
    config = meaning_of(CONFIG_VARIABLE, [("reference/budgets.md", "variable")])
    rows.append(["", "", code(CONFIG_VARIABLE), config])
    return table(["setting", "type", "variable", "meaning"], rows)


def settings_page() -> str:
    """Write the settings of all files."""
    lines = [
        "# Settings",
        "",
        (
            f"Every field of the files, with its variable and its option, and the options of store URLs. {GENERATED} "
            "`tidegate validate FILE` checks a file of any kind; `tidegate validate --schema KIND` prints "
            "its JSON schema."
        ),
        "",
        "## Service file",
        "",
        *service_settings(),
    ]
    for part in (*file_tables(), *store_tables()):
        properties = part.schema.get("properties", {})
        rows = [
            [
                code(name),
                type_of(properties.get(name, {})),
                default_of(name, part.places),
                meaning_of(name, part.places),
            ]
            for name in part.names
        ]
        columns = ["setting", "type", "default", "meaning"]
        shown = [column for column in range(4) if any(row[column] for row in rows)]
        lines += [f"## {part.title}", ""]
        lines += table([columns[each] for each in shown], [[row[each] for each in shown] for row in rows])
    return "\n".join([*lines, "## Budget file", "", *budget_settings()])


# ---- metrics ---------------------------------------------------------------------------------------------------------


def alerts_by_metric() -> dict[str, list[str]]:
    """Return the names of the alerts in deploy/monitoring.yaml that use a metric."""
    found: dict[str, list[str]] = {}
    parts = yaml.safe_load((ROOT / "deploy" / "monitoring.yaml").read_text(encoding="utf-8"))
    for part in parts.values():
        for name, alert in part.get("alerts", {}).items():
            for metric in METRIC.findall(alert["when"]):
                found.setdefault(re.sub("_(bucket|sum|count)$", "", metric), []).append(name)
    return found


def metrics_page() -> str:
    """Write all metrics."""
    alerts = alerts_by_metric()
    lines = [
        "# Metrics",
        "",
        (
            f"Every metric, with its type and its labels. {GENERATED} Labels are names from the configuration, never "
            "keys, addresses or paths. The last column links to the [runbook](../howto/runbook.md)."
        ),
        "",
    ]
    for title, families in metric_families().items():
        rows = [
            [
                code(family.name),
                family.kind,
                ", ".join(map(code, family.labels)),
                plain(family.help),
                ", ".join(
                    f"[{name}](../howto/runbook.md#{name.lower()})" for name in sorted(set(alerts.get(family.name, ())))
                ),
            ]
            for family in families
        ]
        lines += [f"## {title}", "", *table(["metric", "type", "labels", "meaning", "alerts"], rows)]
    return "\n".join(lines)


# ---- header fields ---------------------------------------------------------------------------------------------------


def headers_page() -> str:
    """Write the header fields that tidegate sends and reads."""
    gateway = [("reference/egress.md", "header field of a re"), ("reference/egress.md", "header field of a response")]
    own = [value for name, value in sorted(vars(messages).items()) if str(value).startswith("X-Tidegate-")]
    described = {name for page, first in gateway for row in rows_of(page, first) for name in row.names}
    sent = [
        [code(X_RATELIMIT.limit), "`headers: x` or `both`", "quota of the tightest limit"],
        [code(X_RATELIMIT.remaining), "`headers: x` or `both`", "permits left at the tightest limit"],
        [
            code(X_RATELIMIT.reset),
            "`headers: x` or `both`",
            "when the limit is reset, in seconds since 1970, rounded up",
        ],
        [code(IETF.policy), "`headers: ietf` or `both`", "quota and window of each limit (IETF draft)"],
        [code(IETF.state), "`headers: ietf` or `both`", "remaining permits and reset of each limit (IETF draft)"],
        [
            code(RETRY_AFTER),
            "every denial",
            "whole seconds until the call is allowed, at least 1; missing if it never is",
        ],
    ]
    lines = [
        "# Header fields",
        "",
        f"Every header field that tidegate sends or reads. {GENERATED}",
        "",
        "## Sent with limited responses",
        "",
    ]
    lines += table(["field", "when", "meaning"], sent)
    lines += ["## Of the egress gateway", ""]
    lines += table(
        ["field", "meaning"],
        [
            [
                code(name),
                meaning_of(name, gateway)
                if name in described
                else "a remark, such as what a tunnel hides ([guide](egress.md#what-is-refused))",
            ]
            for name in own
        ],
    )
    lines += ["## Read from responses of providers", "", "tidegate reads these names, in upper or lower case:", ""]
    lines += table(["dialect", "fields"], [[code(name), code_list(dialect)] for name, dialect in DIALECTS.items()])
    lines += [f"Also {', '.join(map(code, (RETRY_AFTER, *RETRY_AFTER_MS)))}, and the fields of these servers:", ""]
    names = {id(dialect): name for name, dialect in DIALECTS.items()}
    rows = [
        [
            name,
            ", ".join(code(names[id(each)]) for each in server.dialects),
            " ".join(code_list(each) for each in server.own),
            f"<{server.source}>",
        ]
        for name, server in SERVERS.items()
    ]
    return "\n".join([*lines, *table(["server", "dialects", "own fields", "source"], rows)])


def code_list(fields: object) -> str:
    """Return the names of fields in a dialect."""
    if template := getattr(fields, "template", ""):
        return code(
            template.replace("-?", "").replace("{name}", "NAME").replace("{what}", "WHAT").replace("{tier}", "TIER")
        )
    texts = [value for value in fields if isinstance(value, str) and "-" in value]  # type: ignore[attr-defined]  # tuples
    texts += [value for value in fields if value == "RateLimit"]  # type: ignore[attr-defined]  # as above
    return ", ".join(map(code, texts))


# ---- log lines -------------------------------------------------------------------------------------------------------


def logs_page() -> str:
    """Write the log lines by logger."""
    lines = [
        "# Log lines",
        "",
        (
            f"Every line that tidegate logs, with its level. {GENERATED} … stands for a value. Loggers below "
            "`tidegate` follow the configuration of `logging` in your program; the service logs to standard error, as "
            "text on a terminal and as JSON otherwise."
        ),
        "",
    ]
    loggers: dict[str, list[LogLine]] = {}
    for line in log_lines():
        loggers.setdefault(line.logger, []).append(line)
    for logger, found in loggers.items():
        rows = [[line.level, plain(line.message)] for line in found]
        lines += [f"## {logger}", "", *table(["level", "message"], rows)]
    return "\n".join(lines)


# ---- JSON fields -----------------------------------------------------------------------------------------------------


def json_page() -> str:
    """Write the fields of the requests and responses of the service."""
    lines = [
        "# JSON fields",
        "",
        (
            f"The fields of requests and responses of the service. {GENERATED} [wire.md](wire.md) has the protocol, "
            " and `GET /openapi.json` returns the schemas."
        ),
        "",
    ]
    schemas = json.loads(document())["components"]["schemas"]
    for name, schema in schemas.items():
        found = properties_of(schema, schemas)
        if found:
            rows = [
                [code(field), type_of(flat(value, schemas)), plain(description_of(value, schemas))]
                for field, value in found.items()
            ]
            lines += [f"## {name}", "", plain(schema.get("description", "")), ""]
            lines += table(["field", "type", "meaning"], rows)
    return "\n".join(lines)


def properties_of(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a schema, and of the schemas that it combines."""
    found: dict[str, Any] = {}
    for part in (*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= properties_of(flat(part, schemas), schemas)
    return {**found, **schema.get("properties", {})}


def flat(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in place of a reference to it."""
    if "$ref" in schema:
        return dict(schemas[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return {**schema, "anyOf": [flat(each, schemas) for each in schema["anyOf"]]}
    return schema


def description_of(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the description of a field, or that of its type."""
    return str(schema.get("description") or flat(schema, schemas).get("description") or "")


# ---- errors ----------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Write the exceptions, the problem types of the service and of the gateway, and the exit codes."""
    exceptions = [getattr(errors, name) for name in sorted(errors.__all__)]
    lines = [
        "# Errors",
        "",
        f"Exceptions, problem types and exit codes. {GENERATED}",
        "A denial is not an error: `try_acquire` returns a Decision.",
        "",
        "## Exceptions",
        "",
        "All are in `tidegate`. In the web frameworks, a denied request is `RateLimitExceeded`, a `Denied`.",
        "",
        *table(
            ["exception", "bases", "meaning"],
            [
                [code(each.__name__), ", ".join(code(base.__name__) for base in each.__bases__), summary_of(each)]
                for each in exceptions
            ],
        ),
        "## Problem types of the service",
        "",
        f"Problem details (RFC 9457) have the type `{PROBLEM_PREFIX}` and one of these names.",
        "",
        *table(
            ["type", "status", "meaning"],
            [[code(kind), str(status), plain(title)] for kind, (status, title) in PROBLEM_KINDS.items()],
        ),
        "The gateway's are in the [guide](egress.md#header-fields-and-errors).",
        "",
        "## Exit codes of commands",
        "",
        *table(["code", "meaning"], [[str(number), plain(meaning)] for number, meaning in EXIT_CODES.items()]),
    ]
    return "\n".join(lines)


def summary_of(described: type) -> str:
    """Return the first line of a docstring."""
    return plain((described.__doc__ or "").strip().partition("\n")[0])


# ---- API -------------------------------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """Write a page of the API for each package, for mkdocstrings."""
    by_package: dict[str, list[str]] = {}
    for module in public_modules():
        by_package.setdefault(".".join(module.split(".")[:2]), []).append(module)
    pages = {}
    for package, found in sorted(by_package.items()):
        lines = [f"# {package}", ""]
        for module in sorted(found):
            if len(found) > 1 or module != package:
                lines += [f"## {module}", ""]
            for name in public_modules()[module]:
                lines += [f"::: {module}.{name}", ""]
        pages[f"reference/api/{package.removeprefix('tidegate.')}.md"] = "\n".join(lines)
    return pages


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/headers.md": headers_page,
    "reference/logs.md": logs_page,
    "reference/json.md": json_page,
    "reference/errors.md": errors_page,
}


def write_pages() -> dict[str, str]:
    """Write the pages of docs/reference, by their path in docs."""
    return {path: f"{write().rstrip()}\n" for path, write in PAGES.items()}


if __name__ == "__main__":
    for path, text in write_pages().items():
        (DOCS / path).write_text(text, encoding="utf-8")
