"""The list of all settings that are single values or lists: name, reader, help text, schema.

Command-line options, environment variables and the JSON schema are built from it; the documentation is checked
against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.headers import STYLES
from tidegate.policy.config_value import ConfigValue
from tidegate.policy.setting_values import (
    PERMISSIONS,
    read_address,
    read_path,
    read_paths,
    read_permissions,
    read_seconds,
    read_string_file,
    read_token,
    read_token_file,
    read_url,
    read_url_file,
)
from tidegate.service.config.values import (
    MAX_BODY_BYTES,
    MAX_FETCHERS,
    MAX_WORKERS,
    MIN_CONNECTIONS,
    READINESS,
    read_budget,
    read_bytes,
    read_connections,
    read_delay,
    read_endpoints,
    read_fetchers,
    read_lease,
    read_metrics_token,
    read_namespace,
    read_priority,
    read_readiness,
    read_secrets,
    read_secrets_file,
    read_style,
    read_workers,
)
from tidegate.spending.settings import SPENDING_SCHEMA, read_spending

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ServiceOption(NamedTuple):
    """One setting. `schema` is its JSON schema, for editors."""

    name: str
    read: Callable[[ConfigValue], Any]
    help: str
    schema: Mapping[str, object]
    metavar: str = "TEXT"
    secret: bool = False  # has no option: other users can read the command line of a process
    many: bool = False  # a list; its option is the name in the singular and may be repeated

    @property
    def flag(self) -> str:
        """The command-line option."""
        return "--" + (self.name.removesuffix("s") if self.many else self.name).replace("_", "-")


STRING: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
ADDRESS: Final = {"type": ["string", "integer"]}
DURATION: Final = {"type": ["string", "number"]}
BOOLEAN: Final = {"type": "boolean"}
INTEGER: Final[dict[str, Any]] = {"type": "integer", "minimum": 1}
STRINGS: Final[dict[str, Any]] = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
OPTIONS: Final = (
    ServiceOption(
        "store",
        ConfigValue.string,
        "URL of the store (default: memory://; sources then use a file in the data folder)",
        STRING,
        "URL",
    ),
    ServiceOption("store_file", read_string_file, "file with the URL of the store", STRING, "FILE"),
    ServiceOption(
        "listen",
        read_address,
        "address of the HTTP server (default: 127.0.0.1:8080)",
        ADDRESS,
        "ADDRESS",
    ),
    ServiceOption(
        "grpc",
        read_address,
        "address of the gRPC server for Envoy (default: none)",
        ADDRESS,
        "ADDRESS",
    ),
    ServiceOption(
        "open",
        ConfigValue.boolean,
        "accept clients on other machines without a token (default: false)",
        BOOLEAN,
        "BOOL",
    ),
    ServiceOption(
        "resp",
        read_address,
        "address of the server for Redis clients (default: none)",
        ADDRESS,
        "ADDRESS",
    ),
    ServiceOption(
        "egress",
        read_address,
        "address of the egress gateway, through which programs call the providers (default: none)",
        ADDRESS,
        "ADDRESS",
    ),
    ServiceOption(
        "egress_config", read_path, "YAML file of the egress gateway: callers, upstreams, bounds", STRING, "FILE"
    ),
    ServiceOption("resp_tls_cert", read_path, "file with the TLS certificate of the resp address", STRING, "FILE"),
    ServiceOption("resp_tls_key", read_path, "file with the private key of the certificate", STRING, "FILE"),
    ServiceOption("decision_token", read_token, "token for decisions", STRING, secret=True),
    ServiceOption("decision_token_file", read_token_file, "file with the token for decisions", STRING, "FILE"),
    ServiceOption("admin_token", read_token, "token for refund, reset and block", STRING, secret=True),
    ServiceOption("admin_token_file", read_token_file, "file with the admin token", STRING, "FILE"),
    ServiceOption(
        "metrics_token",
        read_metrics_token,
        "token for /metrics; none: it needs no token (default: the token for decisions)",
        STRING,
        secret=True,
    ),
    ServiceOption("metrics_token_file", read_token_file, "file with the token for /metrics", STRING, "FILE"),
    ServiceOption(
        "reservation_secret",
        read_secrets,
        "secret that signs reservation ids (default: generated, kept in the store)",
        STRINGS,
        secret=True,
    ),
    ServiceOption(
        "reservation_secret_file",
        read_secrets_file,
        "file with the secrets for reservation ids, one per line: the first signs ids, all of them verify ids",
        STRING,
        "FILE",
    ),
    ServiceOption(
        "lease",
        read_lease,
        "take permits from the store in advance: true, false, or the duration of a lease such as 1s (default: false)",
        {"type": ["boolean", "string", "number"]},
        "TIME",
    ),
    ServiceOption(
        "workers", read_workers, "number of processes (default: 1)", {**INTEGER, "maximum": MAX_WORKERS}, "N"
    ),
    ServiceOption(
        "headers",
        read_style,
        "header fields of /v1/check: x, ietf, both or none (default: x)",
        {"enum": list(STYLES)},
        "STYLE",
    ),
    ServiceOption(
        "max_wait", read_seconds, "maximum time that a call may wait for a permit (default: 30s)", DURATION, "TIME"
    ),
    ServiceOption(
        "max_priority",
        read_priority,
        "highest priority that a call may have; the lowest is -N (default: 100)",
        {"type": "integer", "minimum": 0},
        "N",
    ),
    ServiceOption(
        "max_body",
        read_bytes,
        "maximum size of a request, in bytes (default: 1048576)",
        {**INTEGER, "maximum": MAX_BODY_BYTES},
        "BYTES",
    ),
    ServiceOption(
        "max_concurrency",
        ConfigValue.integer,
        "maximum number of concurrent requests per process (default: 4096)",
        INTEGER,
        "N",
    ),
    ServiceOption(
        "max_connections",
        read_connections,
        "maximum number of connections per process; fewer if the limit on open files is too low (default: 8192)",
        {**INTEGER, "minimum": MIN_CONNECTIONS},
        "N",
    ),
    ServiceOption(
        "read_timeout",
        read_seconds,
        "time within which a client must send a complete request (default: 5s)",
        DURATION,
        "TIME",
    ),
    ServiceOption(
        "idle_timeout", read_seconds, "time after which an idle connection is closed (default: 75s)", DURATION, "TIME"
    ),
    ServiceOption(
        "stop_within",
        read_seconds,
        "time for active requests to finish when the service stops (default: 10s)",
        DURATION,
        "TIME",
    ),
    ServiceOption(
        "reload_every", read_seconds, "how often the file is checked for changes (default: 1s)", DURATION, "TIME"
    ),
    ServiceOption(
        "drain_for",
        read_delay,
        "time after SIGTERM to accept connections while /readyz responds with 503 (default: 1s)",
        DURATION,
        "TIME",
    ),
    ServiceOption(
        "readiness",
        read_readiness,
        "when /readyz responds with 503 during a store outage: if a policy denies calls (policies), always (store), or "
        "never (process) (default: policies)",
        {"enum": list(READINESS)},
        "MODE",
    ),
    ServiceOption("providers", read_paths, "YAML file of a provider (may be repeated)", STRINGS, "FILE", many=True),
    ServiceOption("provider_dirs", read_paths, "folder of provider files (may be repeated)", STRINGS, "DIR", many=True),
    ServiceOption(
        "profiles",
        read_paths,
        "YAML file or folder of profiles that provider files can name (may be repeated)",
        STRINGS,
        "PATH",
        many=True,
    ),
    ServiceOption(
        "spending",
        read_spending,
        "file in which the costs of providers with prices are recorded (default: none)",
        SPENDING_SCHEMA,
        "FILE",
    ),
    ServiceOption("sources", read_paths, "YAML file of a source (may be repeated)", STRINGS, "FILE", many=True),
    ServiceOption("source_dirs", read_paths, "folder of source files (may be repeated)", STRINGS, "DIR", many=True),
    ServiceOption(
        "data",
        read_path,
        "data folder of the sources; sources run if --data, a source or a provider is set (default: tidegate-data)",
        STRING,
        "DIR",
    ),
    ServiceOption(
        "fetchers",
        read_fetchers,
        "maximum number of concurrent fetches of sources (default: 8)",
        {**INTEGER, "maximum": MAX_FETCHERS},
        "N",
    ),
    ServiceOption(
        "source_interval",
        read_seconds,
        "time between fetches of sources without an interval or cron expression (default: 1h)",
        DURATION,
        "TIME",
    ),
    ServiceOption(
        "permissions",
        read_permissions,
        "for provider files that other users can read: warn, refuse or ignore (default: warn)",
        {"enum": list(PERMISSIONS)},
        "MODE",
    ),
    ServiceOption(
        "bus", read_url, "URL of the bus on which sources share capacity reductions (default: none)", STRING, "URL"
    ),
    ServiceOption("bus_file", read_url_file, "file with the URL of the bus", STRING, "FILE"),
    ServiceOption(
        "budget",
        read_budget,
        "task budget to show: a YAML file, or true to read the RATE_LIMIT_* variables (default: false)",
        {"type": ["boolean", "string"]},
        "FILE",
    ),
    ServiceOption(
        "swarm", read_url, "URL of the bus of a swarm, whose agents the dashboard shows (default: none)", STRING, "URL"
    ),
    ServiceOption("swarm_file", read_url_file, "file with the URL of the bus of the swarm", STRING, "FILE"),
    ServiceOption(
        "swarm_namespace",
        read_namespace,
        "namespace of the agents that the dashboard shows (default: agents without a namespace)",
        STRING,
        "NAME",
    ),
    ServiceOption(
        "applications",
        read_endpoints,
        "URL of the admin endpoint of an application, whose inbound limits the dashboard shows (may be repeated)",
        STRINGS,
        "URL",
        many=True,
    ),
    ServiceOption("applications_token", read_token, "admin token of the applications", STRING, secret=True),
    ServiceOption(
        "applications_token_file", read_token_file, "file with the admin token of the applications", STRING, "FILE"
    ),
    ServiceOption(
        "telemetry", ConfigValue.boolean, "export metrics to OpenTelemetry (default: false)", BOOLEAN, "BOOL"
    ),
)
