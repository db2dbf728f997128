"""The events that a client reports while it works, for a user interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    LOOKING = "looking"  # looking up the peers that serve the model
    FETCHING = "fetching"  # tokenizer and manifest; done and total in bytes
    TRUSTED = "trusted"  # an initial peer was trusted without a peer id
    DRAFT = "draft"  # a draft model is loaded, or cannot be used
    ROUTING = "routing"  # measuring peers and choosing among them
    CONNECTED = "connected"  # sessions are open; the text names the route
    PREFILL = "prefill"  # done and total in tokens
    WAITING = "waiting"  # no peer serves some layers now, or all that do are busy
    REPAIRING = "repairing"  # the route is replaced; the text says why


@dataclass(frozen=True, kw_only=True)
class Event:
    """`text` is one line for a person; `done` of `total` if the stage can be counted."""

    stage: Stage
    text: str
    done: int = 0
    total: int = 0


OnEvent = Callable[[Event], None]


def ignore_event(_: Event) -> None:
    """The default for callers that want no events."""
