"""`tidegate egress`: run the egress gateway alone, without the decision service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.extras import check_installed
from tidegate._cli.output import counted
from tidegate._policy.config_value import ConfigValue
from tidegate._policy.setting_values import read_address
from tidegate._runtime.urls import MAX_URL_LENGTH, redact
from tidegate.egress._settings import load_egress

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (
    ("tidegate init egress && tidegate egress egress.yaml", "write a file, and run the gateway with it"),
    ("tidegate egress egress.yaml --listen 127.0.0.1:9000", "listen on another port"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file, and the address."""
    parser.description = (
        "Run only the egress gateway: programs in any language call providers through it, within the quotas."
    )
    parser.add_argument("config", metavar="FILE", help="the YAML file of the gateway (see docs/howto/egress.md)")
    parser.add_argument("--listen", metavar="ADDRESS", help="the address to listen on, instead of the one in the file")


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the gateway until SIGTERM or Ctrl-C."""
    check_installed("tidegate egress", "egress", "aiohttp")
    from tidegate.egress import _run as gateway  # noqa: PLC0415 - needs aiohttp

    address = None if args.listen is None else read_address(ConfigValue(args.listen, field="--listen"))
    settings = load_egress(args.config, address)

    def ready(url: str, providers: list[str]) -> None:
        callers = counted(len(settings.callers), "caller")
        store = redact(settings.store, max_length=MAX_URL_LENGTH)
        names = ", ".join(providers)
        output.write_line(f"egress gateway on {url}: {callers}, providers {names}, permits in {store}", "bold")
        output.write_json({"ready": True, "egress": url, "providers": providers, "permits": store})

    gateway.run(settings, ready, address)
    return 0
