"""Takes screenshots of the dashboard with all components: python -m tests.service.dashboard.screenshots.

The files are written to build/screenshots, which is not committed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.service.dashboard.running_service import DashboardService, browser, send_traffic, with_all_components

FOLDER = Path(__file__).parents[3] / "build" / "screenshots"
SECONDS = 45
WIDE, PHONE = {"width": 1360, "height": 1000}, {"width": 360, "height": 780}


def run_traffic(service: DashboardService, stop: threading.Event) -> None:
    """Send requests until `stop` is set; reduce capacity now and then."""
    rng, second = random.Random(8), 0
    while not stop.wait(1.0):
        send_traffic(service, rng)
        second += 1
        if second in (12, 30):
            service.agents[second % 3].announce_reduced("openai", "received 429 response", retry_after=4)
        if second == 20:
            service.agents[1].announce_reduced("crawler", "503 of the origin")


def main() -> None:
    """Take all screenshots."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, with_all_components(Path(folder)) as service, browser() as chromium:
        stop = threading.Event()
        thread = threading.Thread(target=run_traffic, args=(service, stop))
        thread.start()
        try:
            pages = {
                f"{name}-{scheme}": chromium.new_page(viewport=size, color_scheme=scheme, device_scale_factor=2)  # type: ignore[arg-type]  # a literal
                for name, size in (("dashboard", WIDE), ("dashboard-phone", PHONE))
                for scheme in ("light", "dark")
            }
            for page in pages.values():
                page.goto(service.url)
            time.sleep(seconds)  # collects real traffic; not a test
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
