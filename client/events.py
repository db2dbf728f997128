"""What a client says while it works, for whoever shows it to a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    LOOKING = "looking"  # asking peers who serves the model
    FETCHING = "fetching"  # tokenizer and manifest; done and total in bytes
    TRUSTED = "trusted"  # a first contact without a peer id was believed
    DRAFT = "draft"  # the model that drafts is loaded
    ROUTING = "routing"  # measuring peers and choosing among them
    CONNECTED = "connected"  # sessions are open; the text names the route
    PREFILL = "prefill"  # done and total in tokens
    WAITING = "waiting"  # nobody serves some layers now, or everybody is busy
    REPAIRING = "repairing"  # a peer is given up; the text says why


@dataclass(frozen=True, kw_only=True)
class Event:
    """`text` is one line for a person; `done` of `total` where there is something to count."""

    stage: Stage
    text: str
    done: int = 0
    total: int = 0


OnEvent = Callable[[Event], None]


def unheard(_: Event) -> None:
    """For callers that do not listen."""
