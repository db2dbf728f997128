"""A strict parser of server-sent events (HTML standard, section 9.2.5)."""

from __future__ import annotations

import json
from typing import Any


def events(body: bytes) -> list[str]:
    """The data of each event. Fails on anything that is not `data: ...`, a comment, or an empty line."""
    text = body.decode("utf-8", "strict")
    assert text.endswith("\n\n"), "the last event is not complete"
    assert "\r" not in text
    found = []
    for block in text[:-2].split("\n\n"):
        lines = block.split("\n")
        assert all(lines), "an empty event"
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert all(line.startswith(("data: ", ":")) for line in lines), block
        assert len(data) <= 1
        found.extend(data)
    return found


def chunks(body: bytes) -> list[dict[str, Any]]:
    """The chunks of a completion: JSON objects, then [DONE] as the last event."""
    data = events(body)
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(each) for each in data[:-1]]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice."""
    choices = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)
