from __future__ import annotations

from swarm import __version__
from swarm.transport.hello import client_hello, peer_hello


def test_clients_and_peers_name_the_same_software() -> None:
    assert client_hello().software == peer_hello().software == f"aipc-swarm/{__version__}"
    assert (client_hello("d").role, client_hello("d").model, peer_hello(name="n").name) == ("client", "d", "n")
