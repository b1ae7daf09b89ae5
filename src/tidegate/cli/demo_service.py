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

from tidegate.cli.start import read_settings, serve, write_started
from tidegate.errors import ConfigError
from tidegate.service.runtime.server import choose_ports

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output
    from tidegate.service.config.settings import Settings
    from tidegate.service.runtime.components import Components


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
        settings = with_free_port(replace(settings, demo=not args.no_demo_traffic))
        serve(settings, ready, level=logging.ERROR)
    output.write_line("stopped")


def with_free_port(settings: Settings) -> Settings:
    """Choose another port if the default one is in use, unless an option or a variable set it."""
    try:
        return choose_ports(settings)
    except ConfigError:
        if "listen" in settings.flags or "TIDEGATE_LISTEN" in os.environ:
            raise
        return replace(settings, listen=settings.listen._replace(port=0))


def has_display() -> bool:
    """Return whether a browser can open a window."""
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
