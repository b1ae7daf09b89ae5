"""The settings that are single values or lists of them: name, how it is read, what it means. The whole list.

Flags, variables, the schema for editors and the documentation are made from it or checked against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.headers import STYLES
from tidegate.policy.settings import Setting
from tidegate.service.values import (
    LONGEST_BODY,
    MIN_CONNECTIONS,
    MOST_FETCHERS,
    MOST_WORKERS,
    PERMISSIONS,
    read_address,
    read_budget,
    read_bytes,
    read_connections,
    read_fetchers,
    read_lease,
    read_path,
    read_paths,
    read_permissions,
    read_priority,
    read_seconds,
    read_secrets,
    read_secrets_file,
    read_style,
    read_token,
    read_token_file,
    read_url,
    read_workers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Option(NamedTuple):
    """One setting that is a single value. `schema` is what an editor is told of it."""

    name: str
    read: Callable[[Setting], Any]
    help: str
    schema: Mapping[str, object]
    metavar: str = "TEXT"
    secret: bool = False  # not by flag: the command line of a process is public
    many: bool = False  # a list; the flag has its name in the singular and may be repeated

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        return "--" + (self.name.removesuffix("s") if self.many else self.name).replace("_", "-")


TEXT: Final = {"type": "string", "minLength": 1}
TIME: Final = {"type": ["string", "number"]}
FLAG: Final = {"type": "boolean"}
WHOLE: Final = {"type": "integer", "minimum": 1}
TEXTS: Final = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
OPTIONS: Final = (
    Option(
        "store", Setting.text, "where states are kept, by URL (memory://; of sources: the data folder)", TEXT, "URL"
    ),
    Option(
        "listen",
        read_address,
        "address of the HTTP service (127.0.0.1:8080)",
        {"type": ["string", "integer"]},
        "ADDRESS",
    ),
    Option("grpc", read_address, "address of the service for Envoy (none)", {"type": ["string", "integer"]}, "ADDRESS"),
    Option("open", Setting.flag, "listen beyond this machine without a token (false)", FLAG, "FLAG"),
    Option("decision_token", read_token, "token that decisions need", TEXT, secret=True),
    Option("decision_token_file", read_token_file, "file that holds that token", TEXT, "FILE"),
    Option("admin_token", read_token, "token that resets and the like need", TEXT, secret=True),
    Option("admin_token_file", read_token_file, "file that holds that token", TEXT, "FILE"),
    Option(
        "reservation_secret",
        read_secrets,
        "secret that signs reservation ids (the store keeps one)",
        TEXTS,
        secret=True,
    ),
    Option(
        "reservation_secret_file",
        read_secrets_file,
        "file that holds that secret, or several, the first of which signs",
        TEXT,
        "FILE",
    ),
    Option(
        "lease",
        read_lease,
        "take permits ahead, for so long (false)",
        {"type": ["boolean", "string", "number"]},
        "TIME",
    ),
    Option("workers", read_workers, "processes that serve (1)", {**WHOLE, "maximum": MOST_WORKERS}, "N"),
    Option(
        "headers", read_style, "header fields of /v1/check: x, ietf, both or none (x)", {"enum": list(STYLES)}, "STYLE"
    ),
    Option("max_wait", read_seconds, "longest that a call may wait for a permit (30s)", TIME, "TIME"),
    Option(
        "max_priority",
        read_priority,
        "largest priority that a call may have, up or down (100)",
        {"type": "integer", "minimum": 0},
        "N",
    ),
    Option("max_body", read_bytes, "largest request, in bytes (1048576)", {**WHOLE, "maximum": LONGEST_BODY}, "BYTES"),
    Option("max_concurrency", Setting.whole, "requests under way at most, in each process (4096)", WHOLE, "N"),
    Option(
        "max_connections",
        read_connections,
        "open connections at most, in each process; fewer if the limit of open files is lower (8192)",
        {**WHOLE, "minimum": MIN_CONNECTIONS},
        "N",
    ),
    Option("read_timeout", read_seconds, "time in which a client has to send a whole request (5s)", TIME, "TIME"),
    Option("idle_timeout", read_seconds, "time after which an idle connection is closed (75s)", TIME, "TIME"),
    Option("stop_within", read_seconds, "how long requests under way may take when stopping (10s)", TIME, "TIME"),
    Option("reload_every", read_seconds, "how often the file is looked at (1s)", TIME, "TIME"),
    Option("providers", read_paths, "a provider's YAML file (may be repeated)", TEXTS, "FILE", many=True),
    Option("provider_dirs", read_paths, "a folder of them (may be repeated)", TEXTS, "DIR", many=True),
    Option("sources", read_paths, "a source's YAML file (may be repeated)", TEXTS, "FILE", many=True),
    Option("source_dirs", read_paths, "a folder of them (may be repeated)", TEXTS, "DIR", many=True),
    Option(
        "data", read_path, "folder of the sources; they run if it or one of them is named (tidegate-data)", TEXT, "DIR"
    ),
    Option(
        "fetchers", read_fetchers, "requests of sources under way at most (8)", {**WHOLE, "maximum": MOST_FETCHERS}, "N"
    ),
    Option(
        "permissions",
        read_permissions,
        "for providers' keys that others may read: warn, refuse or ignore (warn)",
        {"enum": list(PERMISSIONS)},
        "WORD",
    ),
    Option("bus", read_url, "where sources share reductions of capacity (none)", TEXT, "URL"),
    Option(
        "budget",
        read_budget,
        "show a task budget: true, of the environment; or its YAML file (false)",
        {"type": ["boolean", "string"]},
        "FILE",
    ),
    Option("swarm", read_url, "show the agents on this bus (none)", TEXT, "URL"),
    Option("telemetry", Setting.flag, "tell OpenTelemetry of decisions (false)", FLAG, "FLAG"),
)
