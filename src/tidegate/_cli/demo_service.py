"""Runs `tidegate start --demo`: the service in a temporary folder, on a free port, with the dashboard in a browser."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import webbrowser
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate._cli.start import read_settings, serve, write_started
from tidegate.errors import ConfigError
from tidegate.service._runtime.server import choose_ports, listen

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate._policy.setting_values import ListenAddress
    from tidegate.service._config.settings import Settings
    from tidegate.service._runtime.components import Components


def run_demo(args: argparse.Namespace, output: Output) -> None:
    """Run a demonstration until Ctrl-C; its folder is removed afterwards."""
    if args.config is not None:
        args.config = str(Path(args.config).absolute())

    def ready(settings: Settings, components: Components | None) -> None:
        write_started(settings, components, output)
        output.write_line(f"\n  The dashboard: http://{settings.listen}/\n", "bold", "green")
        output.write_line("Ctrl-C ends the demonstration.", "dim")
        if output.live and has_display():
            webbrowser.open(f"http://{settings.listen}/")

    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as folder, chdir(folder):
        settings = read_settings(args)
        # Denials are shown on the dashboard, not in the terminal.
        settings = with_free_port(replace(settings, demo=not args.no_demo_traffic), output)
        serve(settings, ready, level=logging.ERROR)
    output.write_line("stopped")


def with_free_port(settings: Settings, output: Output) -> Settings:
    """Choose other ports if the default ones are in use, and say so, unless an option or a variable set them."""
    for name in ("listen", "egress"):
        address: ListenAddress | None = getattr(settings, name)
        if address is None or name in settings.flags or f"TIDEGATE_{name.upper()}" in os.environ:
            continue
        try:
            listen(address, name).close()
        except ConfigError:
            output.write_line(f"port {address.port} is in use: choosing another one for {name}")
            settings = replace(settings, **{name: address._replace(port=0)})  # type: ignore[arg-type]  # by name
    return choose_ports(settings)


def has_display() -> bool:
    """Return whether a browser can open a window."""
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
