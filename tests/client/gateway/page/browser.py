"""A headless Chromium that visits a gateway's page and records console messages and requested URLs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

PATIENCE_MS = 60_000
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


@dataclass
class Visitor:
    """One browser; records errors and requests of every page that it opens."""

    browser: Browser
    url: str
    complaints: list[str] = field(default_factory=list)
    requested: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def visit(self, view: str = "", *, size: dict[str, int] = WIDE, theme: str = "light") -> Iterator[Page]:
        """Open a page with its own storage; `view` is appended to the address."""
        options: dict[str, Any] = {"viewport": size, "color_scheme": theme, "reduced_motion": "reduce"}
        context: BrowserContext = self.browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=self.url)
        try:
            page = context.new_page()
            page.on("console", lambda message: self._on_console(message.type, message.text))
            page.on("pageerror", lambda error: self.complaints.append(str(error)))
            page.on("request", lambda request: self.requested.add(request.url))
            page.goto(f"{self.url}/{view}")
            yield page
        finally:
            context.close()

    def _on_console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is no browser. Its thread cannot run another event loop meanwhile."""
    with sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), bundled)
        if not Path(found).is_file():
            pytest.skip("no browser: install Debian's chromium, or run `playwright install chromium`")
        # Chromium's sandbox does not work for root, the usual user in a container.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=options)
        try:
            yield browser
        finally:
            browser.close()
