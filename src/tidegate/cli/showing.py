"""How `tidegate start --demo` shows the service: in a folder of its own, on a free port, in a browser if it can."""

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

from tidegate.cli.start import greet, serve, settings_of
from tidegate.errors import ConfigError
from tidegate.service.server import take_addresses

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.service.parts import Parts
    from tidegate.service.settings import Settings


def show(args: argparse.Namespace, say: Say) -> None:
    """Run a demonstration until Ctrl-C; nothing is left of it."""
    if args.config is not None:
        args.config = str(Path(args.config).absolute())

    def ready(settings: Settings, parts: Parts | None) -> None:
        greet(settings, parts, say)
        say.line(f"\n  The dashboard: http://{settings.listen}/\n", "bold", "green")
        say.line("Ctrl-C ends the demonstration.", "dim")
        if say.live and has_display():
            webbrowser.open(f"http://{settings.listen}/")

    with tempfile.TemporaryDirectory(prefix="tidegate-demo-") as folder, chdir(folder):
        settings = settings_of(args)
        # Who is denied is to be seen on the page, not in the terminal.
        serve(free(replace(settings, demo=not args.no_demo_traffic)), ready, level=logging.ERROR)
    say.line("stopped")


def free(settings: Settings) -> Settings:
    """Choose another port where the usual one is taken, unless it was asked for."""
    try:
        return take_addresses(settings)
    except ConfigError:
        if "listen" in settings.flags or "TIDEGATE_LISTEN" in os.environ:
            raise
        return replace(settings, listen=settings.listen._replace(port=0))


def has_display() -> bool:
    """Tell whether a browser would have a window."""
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
