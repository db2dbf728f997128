"""Checks of the page's files that need no browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client.gateway.app import PAGE
from client.gateway.keys import Keys
from tests.client.gateway.toy_gateway import toy_gateway

FILES = sorted(PAGE.iterdir())
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc")
ELSEWHERE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.[\w.]+")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_makes_no_markup_requests_no_other_site_and_is_short(path: Path) -> None:
    text = path.read_text()
    assert MARKUP.findall(text) == []
    assert ELSEWHERE.findall(text) == []
    assert len(text.splitlines()) <= 400
    # The content security policy forbids inline scripts and styles.
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", text) or path.suffix != ".html"


def test_the_page_needs_no_key_and_has_its_security_headers() -> None:
    with toy_gateway(keys=Keys(["sk-the-key-of-tests"])) as gateway:
        for path in ["", *(path.name for path in FILES)]:  # `/api.js` is not under `/api/`
            response = gateway.http.get(f"/{path}")
            assert response.status_code == 200, path
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert gateway.http.get("/api/swarm").status_code == 401


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_enough_contrast_on_its_ground(theme: int) -> None:
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", (PAGE / "base.css").read_text())
    colours = {name: pair[theme] for name, *pair in pairs}
    grounds = {"ink": "ground raised sunken", "soft": "ground raised sunken", "accent": "ground", "warn": "ground"}
    grounds |= {"bad": "ground bad-tint", "on-accent": "accent", "focus": "raised"}
    for text, names in grounds.items():
        for ground in names.split():
            min_contrast = 3 if text == "focus" else 4.5
            assert contrast(colours[text], colours[ground]) >= min_contrast, (text, ground)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours by WCAG 2, 1 to 21."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
