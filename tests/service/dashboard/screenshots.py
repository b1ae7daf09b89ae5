"""Takes screenshots of the dashboard in ten situations, at three widths, light and dark.

python -m tests.service.dashboard.screenshots writes them to build/screenshots: SITUATION-WIDTH-SCHEME.png. Names of
situations as arguments select some of them; --seconds says how long each gets traffic. They are not committed; those in
docs/images are chosen by hand.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tests.service.dashboard.dashboard_service import browser
from tests.service.dashboard.situations import SITUATIONS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.service.dashboard.situations import Situation

FOLDER = Path(__file__).parents[3] / "build" / "screenshots"
SECONDS = 30
WIDTHS = {1440: 900, 1024: 768, 390: 844}  # pixels: the heights are those of common screens
SCHEMES = ("light", "dark")


def run_traffic(situation: Situation, service: object, stop: threading.Event) -> None:
    """Send the traffic of each second until `stop` is set."""
    generator, second = random.Random(8), 0
    while not stop.wait(1.0):
        situation.traffic(service, second, generator)
        second += 1


def take(chromium: Browser, situation: Situation, seconds: int) -> None:
    """Take the screenshots of one situation: the whole page, and its first screen."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = stack.enter_context(situation.open(folder))
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        stack.callback(page.close)
        page.goto(service.url)
        stop = threading.Event()
        thread = threading.Thread(target=run_traffic, args=(situation, service, stop))
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        page.wait_for_timeout(1000 * seconds)
        for width, height in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # a literal
                page.wait_for_timeout(1100)
                name = f"{situation.name}-{width}-{scheme}"
                page.screenshot(path=FOLDER / f"{name}.png")
                page.screenshot(path=FOLDER / f"{name}-all.png", full_page=True)


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SITUATION", choices=[[], *(each.name for each in SITUATIONS)])
    parser.add_argument("--seconds", type=int, default=SECONDS)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        for situation in SITUATIONS:
            if not arguments.names or situation.name in arguments.names:
                take(chromium, situation, arguments.seconds)
                sys.stdout.write(f"{situation.name}\n")


if __name__ == "__main__":
    main()
