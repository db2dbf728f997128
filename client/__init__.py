"""A client of a swarm: `SwarmClient`, its options and its results.

A name is imported at its first use: `import client` loads neither OpenVINO, hivemind nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.client import SwarmClient as SwarmClient
    from client.config import ClientConfig as ClientConfig
    from client.config import GenerationConfig as GenerationConfig
    from client.events import Event as Event
    from client.generation.chat import ChatSession as ChatSession
    from client.generation.generate import Piece as Piece
    from client.generation.generate import Reply as Reply
    from client.metrics import Metrics as Metrics

_MODULES = {
    "ChatSession": "client.generation.chat",
    "ClientConfig": "client.config",
    "Event": "client.events",
    "GenerationConfig": "client.config",
    "Metrics": "client.metrics",
    "Piece": "client.generation.generate",
    "Reply": "client.generation.generate",
    "SwarmClient": "client.client",
}

__all__ = [
    "ChatSession",
    "ClientConfig",
    "Event",
    "GenerationConfig",
    "Metrics",
    "Piece",
    "Reply",
    "SwarmClient",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'client' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
