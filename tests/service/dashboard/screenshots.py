"""Draws the dashboard, with traffic, a swarm, sources and a budget: python -m tests.service.dashboard.screenshots.

Into build/screenshots: pictures are made when they are needed, and git takes none.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.service.dashboard.stage import Stage, browser, visit, whole

FOLDER = Path(__file__).parents[3] / "build" / "screenshots"
SECONDS = 45
WIDE, PHONE = {"width": 1360, "height": 1000}, {"width": 360, "height": 780}


def traffic(stage: Stage, stop: threading.Event) -> None:
    """Visit until told to stop; reduce capacity now and then."""
    dice, second = random.Random(8), 0
    while not stop.wait(1.0):
        visit(stage, dice)
        second += 1
        if second in (12, 30):
            stage.agents[second % 3].announce_reduced("openai", "received 429 response", retry_after=4)
        if second == 20:
            stage.agents[1].announce_reduced("crawler", "503 of the origin")


def main() -> None:
    """Make all pictures."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, whole(Path(folder)) as stage, browser() as chromium:
        stop = threading.Event()
        thread = threading.Thread(target=traffic, args=(stage, stop))
        thread.start()
        try:
            pages = {
                f"{name}-{scheme}": chromium.new_page(viewport=size, color_scheme=scheme, device_scale_factor=2)  # type: ignore[arg-type]  # a literal
                for name, size in (("dashboard", WIDE), ("dashboard-phone", PHONE))
                for scheme in ("light", "dark")
            }
            for page in pages.values():
                page.goto(stage.url)
            time.sleep(seconds)  # a picture of real traffic; no test
            for name, page in pages.items():
                page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
            page = pages["dashboard-light"]
            page.locator("#search-policy").select_option("login")
            page.locator("#search-key").fill("203.0.113.9")
            page.keyboard.press("Enter")
            page.locator("#uses tbody tr").nth(1).wait_for()
            page.screenshot(path=FOLDER / "dashboard-key.png")
        finally:
            stop.set()
            thread.join()
    sys.stdout.write("".join(f"{path}\n" for path in sorted(FOLDER.glob("dashboard-*.png"))))


if __name__ == "__main__":
    main()
