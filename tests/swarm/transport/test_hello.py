from __future__ import annotations

from swarm import __version__
from swarm.transport.hello import client_hello, peer_hello


def test_everybody_names_the_same_program() -> None:
    assert client_hello().software == peer_hello().software == f"aipc-swarm/{__version__}"
    assert (client_hello("d").role, client_hello("d").model, peer_hello(name="n").name) == ("client", "d", "n")
