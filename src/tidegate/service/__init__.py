"""The engine over the network: HTTP, Envoy's rate limit service, checks for proxies.

settings = load_settings("service.yaml")
run(settings)                                # until SIGTERM or Ctrl-C; `tidegate serve` does the same

settings -> rulebook      what the file says (reading), which policy decides on a key (rulebook, domains)
desk                      every verb, over one store; receipts are its reservations, tally its counts
http, envoy               how questions arrive
server, workers           processes
client                    the other end
"""

from tidegate.service.settings import Settings, load_settings

__all__ = ["Settings", "load_settings", "run"]


def run(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT."""
    from tidegate.service.server import run as run_service  # noqa: PLC0415 - reading settings needs no server

    run_service(settings)
