"""The settings that are single values or lists of them: name, how it is read, what it means. The whole list.

Flags, variables, the schema for editors and the documentation are made from it or checked against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.headers import STYLES
from tidegate.policy.config_value import ConfigValue
from tidegate.service.config.values import (
    MAX_BODY_BYTES,
    MAX_FETCHERS,
    MAX_WORKERS,
    MIN_CONNECTIONS,
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


class ServiceOption(NamedTuple):
    """One setting that is a single value. `schema` is what an editor is told of it."""

    name: str
    read: Callable[[ConfigValue], Any]
    help: str
    schema: Mapping[str, object]
    metavar: str = "TEXT"
    secret: bool = False  # not by flag: the command line of a process is public
    many: bool = False  # a list; the flag has its name in the singular and may be repeated

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        return "--" + (self.name.removesuffix("s") if self.many else self.name).replace("_", "-")


STRING: Final = {"type": "string", "minLength": 1}
DURATION: Final = {"type": ["string", "number"]}
BOOLEAN: Final = {"type": "boolean"}
INTEGER: Final = {"type": "integer", "minimum": 1}
STRINGS: Final = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
OPTIONS: Final = (
    ServiceOption(
        "store",
        ConfigValue.text,
        "where states are kept, by URL (memory://; of sources: the data folder)",
        STRING,
        "URL",
    ),
    ServiceOption(
        "listen",
        read_address,
        "address of the HTTP service (127.0.0.1:8080)",
        {"type": ["string", "integer"]},
        "ADDRESS",
    ),
    ServiceOption(
        "grpc", read_address, "address of the service for Envoy (none)", {"type": ["string", "integer"]}, "ADDRESS"
    ),
    ServiceOption("open", ConfigValue.flag, "listen beyond this machine without a token (false)", BOOLEAN, "FLAG"),
    ServiceOption("decision_token", read_token, "token that decisions need", STRING, secret=True),
    ServiceOption("decision_token_file", read_token_file, "file that holds that token", STRING, "FILE"),
    ServiceOption("admin_token", read_token, "token that resets and the like need", STRING, secret=True),
    ServiceOption("admin_token_file", read_token_file, "file that holds that token", STRING, "FILE"),
    ServiceOption(
        "reservation_secret",
        read_secrets,
        "secret that signs reservation ids (the store keeps one)",
        STRINGS,
        secret=True,
    ),
    ServiceOption(
        "reservation_secret_file",
        read_secrets_file,
        "file that holds that secret, or several, the first of which signs",
        STRING,
        "FILE",
    ),
    ServiceOption(
        "lease",
        read_lease,
        "take permits ahead, for so long (false)",
        {"type": ["boolean", "string", "number"]},
        "TIME",
    ),
    ServiceOption("workers", read_workers, "processes that serve (1)", {**INTEGER, "maximum": MAX_WORKERS}, "N"),
    ServiceOption(
        "headers", read_style, "header fields of /v1/check: x, ietf, both or none (x)", {"enum": list(STYLES)}, "STYLE"
    ),
    ServiceOption("max_wait", read_seconds, "longest that a call may wait for a permit (30s)", DURATION, "TIME"),
    ServiceOption(
        "max_priority",
        read_priority,
        "largest priority that a call may have, up or down (100)",
        {"type": "integer", "minimum": 0},
        "N",
    ),
    ServiceOption(
        "max_body", read_bytes, "largest request, in bytes (1048576)", {**INTEGER, "maximum": MAX_BODY_BYTES}, "BYTES"
    ),
    ServiceOption(
        "max_concurrency", ConfigValue.whole, "requests under way at most, in each process (4096)", INTEGER, "N"
    ),
    ServiceOption(
        "max_connections",
        read_connections,
        "open connections at most, in each process; fewer if the limit of open files is lower (8192)",
        {**INTEGER, "minimum": MIN_CONNECTIONS},
        "N",
    ),
    ServiceOption(
        "read_timeout", read_seconds, "time in which a client has to send a whole request (5s)", DURATION, "TIME"
    ),
    ServiceOption(
        "idle_timeout", read_seconds, "time after which an idle connection is closed (75s)", DURATION, "TIME"
    ),
    ServiceOption(
        "stop_within", read_seconds, "how long requests under way may take when stopping (10s)", DURATION, "TIME"
    ),
    ServiceOption("reload_every", read_seconds, "how often the file is looked at (1s)", DURATION, "TIME"),
    ServiceOption("providers", read_paths, "a provider's YAML file (may be repeated)", STRINGS, "FILE", many=True),
    ServiceOption("provider_dirs", read_paths, "a folder of them (may be repeated)", STRINGS, "DIR", many=True),
    ServiceOption("sources", read_paths, "a source's YAML file (may be repeated)", STRINGS, "FILE", many=True),
    ServiceOption("source_dirs", read_paths, "a folder of them (may be repeated)", STRINGS, "DIR", many=True),
    ServiceOption(
        "data",
        read_path,
        "folder of the sources; they run if it or one of them is named (tidegate-data)",
        STRING,
        "DIR",
    ),
    ServiceOption(
        "fetchers",
        read_fetchers,
        "requests of sources under way at most (8)",
        {**INTEGER, "maximum": MAX_FETCHERS},
        "N",
    ),
    ServiceOption(
        "permissions",
        read_permissions,
        "for providers' keys that others may read: warn, refuse or ignore (warn)",
        {"enum": list(PERMISSIONS)},
        "WORD",
    ),
    ServiceOption("bus", read_url, "where sources share reductions of capacity (none)", STRING, "URL"),
    ServiceOption(
        "budget",
        read_budget,
        "show a task budget: true, of the environment; or its YAML file (false)",
        {"type": ["boolean", "string"]},
        "FILE",
    ),
    ServiceOption("swarm", read_url, "show the agents on this bus (none)", STRING, "URL"),
    ServiceOption("telemetry", ConfigValue.flag, "tell OpenTelemetry of decisions (false)", BOOLEAN, "FLAG"),
)
