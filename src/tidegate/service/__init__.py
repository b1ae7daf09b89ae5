"""The rate limiter as a network service, over HTTP, RESP and Envoy's gRPC protocol.

settings = load_settings("service.yaml")
run(settings)                                # until SIGTERM or Ctrl-C; `tidegate start` does the same

config                    settings, policy files, reload; converts files of Envoy's rate limit service
decisions                 every verb over one store: policies, limiters, reservation ids, leases, blocks, counts
api                       the table of verbs, and the types of their requests and responses
http, resp, envoy         the protocols
dashboard                 the page that shows the state of the service
runtime                   processes, and optional components: sources, a budget, a swarm, telemetry, a demo
client                    calls a running service, with leases on the client side
doctor                    checks a deployment
explain                   which limits apply to a call, and why
"""

from tidegate.service._config.settings import Settings, load_settings

__all__ = ["Settings", "load_settings", "run"]


def run(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT."""
    from tidegate.service._runtime.server import run as run_service  # noqa: PLC0415 - reading settings needs no server

    run_service(settings)
