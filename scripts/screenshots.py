"""Takes the pictures of the web UI that README and docs show, from a demo that runs.

    batchmill run --demo forever --home demo     # in another terminal, for 15 minutes
    python scripts/screenshots.py http://127.0.0.1:8080

The demo's shop has an incident in its third and fourth minute, and then every quarter of an hour.
The script waits for the next one: the overview is saved only if the service is red there. Pictures
follow the incident from the alert to the trace of a slow statement, by two clicks. Needs Playwright
and Debian's Chromium, as the browser tests do.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = Path(__file__).parent.parent / "docs" / "img"

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def views(service: str, more: str) -> dict[str, str]:
    """The pictures of pages that need no click: name and address."""
    return {
        "service": f"#/service/{service}?{more}",
        "topology": f"#/topology?{more}",
        "explore": f"#/explore?metric=service_percentile_micros&label=p99&{more}",
    }


def wait_until_red(page: Page, service: str, wait_s: float) -> None:
    """Return once the overview grades the success rate of a service as bad; exit if it does not."""
    from playwright.sync_api import TimeoutError as NotInTime

    name = page.get_by_role("link", name=service, exact=True)
    row = page.locator("table.services tbody tr", has=name)
    try:
        row.locator("td", has_text="Success").locator(".is-bad").wait_for(timeout=wait_s * 1000)
    except NotInTime:
        sys.exit(f"{service} is not red in the overview, and was not within {wait_s:g} seconds")


def main() -> None:
    """Write the pictures to ``docs/img``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the web UI, such as http://127.0.0.1:8080")
    parser.add_argument("--service", default="catalogue", help="the service that has pictures")
    parser.add_argument("--range", default="from=now-15m", help="the time range, as in an address")
    parser.add_argument("--incident", default="from=now-5m", help="the range with the incident")
    parser.add_argument("--wait", type=float, default=1200.0, help="seconds to wait for red")
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder to write to")
    given = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("Chromium is not here: install the package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")

        def save(name: str) -> None:
            page.wait_for_function("document.fonts.status === 'loaded'")
            page.wait_for_timeout(500)  # a chart is drawn after its data has come
            path = given.into / f"{name}.png"
            path.write_bytes(page.screenshot())
            sys.stdout.write(f"{path}\n")

        page.goto(f"{given.address}/#/services?{given.incident}")
        wait_until_red(page, given.service, given.wait)
        save("overview")
        for name, where in views(given.service, given.range).items():
            page.goto(f"{given.address}/{where}")
            page.locator("main[aria-busy]").wait_for(state="detached")
            page.locator("main table tbody tr").first.wait_for()
            save(name)
        page.goto(f"{given.address}/#/alerts?{given.incident}")
        alert = page.locator("main table tbody tr", has_text="service_errors").first
        alert.wait_for()
        save("alerts")
        alert.get_by_role("link", name=given.service, exact=True).first.click()
        statements = page.get_by_role("table", name="Slow statements")
        statements.scroll_into_view_if_needed()
        save("statements")
        # The time of a statement leads to its trace.
        statements.locator("tbody tr").first.get_by_role("link").last.click()
        page.locator(".row").first.wait_for()
        save("trace")
        browser.close()


if __name__ == "__main__":
    main()
