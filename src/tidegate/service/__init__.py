"""The engine over the network: HTTP, Envoy's rate limit service, checks for proxies.

settings = load_settings("service.yaml")
run(settings)                                # until SIGTERM or Ctrl-C; `tidegate start` does the same

settings -> rulebook      what the file says (options, values, reading); which policy decides on a key (domains)
desk                      every verb, over one store: seats, receipts of reservations, leases, blocks; tally counts
http, envoy, dashboard    how questions arrive; a page that shows everything
server, workers, parts    processes, and what runs beside the decisions: sources, a budget, a swarm
client                    the other end: questions words and reads, shelf keeps what was taken ahead
doctor, telemetry, demo   looks at a deployment; OpenTelemetry; demonstration traffic
"""

from tidegate.service.config.settings import Settings, load_settings

__all__ = ["Settings", "load_settings", "run"]


def run(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT."""
    from tidegate.service.runtime.server import run as run_service  # noqa: PLC0415 - reading settings needs no server

    run_service(settings)
