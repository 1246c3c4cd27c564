"""Pages in a real browser, and what tests wait for on them."""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
PATIENCE = 60_000
"""Milliseconds. A loaded machine is slow; what is there does not wait."""


@dataclass
class Tab:
    """A page, and what went wrong on it."""

    page: Any
    problems: list[str]
    asked: list[str]
    """Every address that it asked for."""


Open = Callable[..., Tab]
Keep = Callable[..., None]


def says(where: Any, text: str) -> None:
    """Waits until the part of the page says it."""
    from playwright.sync_api import expect

    expect(where).to_contain_text(text, timeout=PATIENCE)


def has(where: Any, count: int) -> None:
    """Waits until there are so many of them."""
    from playwright.sync_api import expect

    expect(where).to_have_count(count, timeout=PATIENCE)


def until(page: Any, condition: str) -> None:
    """Waits until the expression is true on the page, whose policy forbids Playwright's own way."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def at(page: Any, part: str) -> None:
    """Waits until the address contains it."""
    from playwright.sync_api import expect

    expect(page).to_have_url(re.compile(re.escape(part)), timeout=PATIENCE)
