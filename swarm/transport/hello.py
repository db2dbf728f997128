"""The Hello messages of clients and peers."""

from __future__ import annotations

from swarm import __version__
from swarm.wire.messages import PROTOCOL_VERSION, Hello

SOFTWARE = f"aipc-swarm/{__version__}"


def client_hello(model: str = "") -> Hello:
    """`model` is the digest that the client will use, empty if it only sends queries."""
    return Hello(protocol=PROTOCOL_VERSION, software=SOFTWARE, role="client", model=model)


def peer_hello(*, model: str = "", name: str = "", incarnation: int = 0) -> Hello:
    """`model` is the digest that the peer serves, empty while it serves none."""
    return Hello(
        protocol=PROTOCOL_VERSION, software=SOFTWARE, role="peer", model=model, name=name, incarnation=incarnation
    )
