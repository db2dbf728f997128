from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import AddressError
from swarm.transport.address import Address

PEER = "abcdefghijklmnopqrstuvwxyz234567"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.168.1.7:31337", Address("192.168.1.7", 31337)),
        ("my-host.example_1.org:1", Address("my-host.example_1.org", 1)),
        ("[::1]:65535", Address("::1", 65535)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
        (f"10.0.0.1:7#{PEER}", Address("10.0.0.1", 7, PEER)),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text
    assert address.host_port == text.partition("#")[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the port is missing"),
        ("host", "the port is missing"),
        (":80", "is not a host name"),
        ("host:", "is not a port"),
        ("host:http", "is not a port"),
        ("host:-1", "is not a port"),
        ("host:65536", "is not a port"),
        ("host:" + "9" * 5000, "is not a port"),
        ("host:" + "0" * 5000, "is not a port"),
        ("host:00000099999", "is not a port"),
        ("host:٣", "is not a port"),
        ("host:0", "port 0 cannot be connected to"),
        (" host:80", "a space"),
        ("host :80", "a space"),
        ("host:80\n", "a space"),
        ("http://host:80", "neither a URL nor a multiaddress"),
        ("/ip4/10.0.0.1/tcp/80", "neither a URL nor a multiaddress"),
        ("::1:80", "is not a host name"),
        ("[]:80", "is not a host name"),
        ("ho$t:80", "is not a host name"),
        ("host:80#", "is not a peer id"),
        ("host:80#short", "is not a peer id"),
        (f"host:80#{PEER.upper()}", "is not a peer id"),
        (f"host:80#{PEER}#{PEER}", "is not a peer id"),
    ],
)
def test_the_error_of_an_invalid_address_quotes_it_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert reason in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "write HOST:PORT" in str(caught.value)


def test_port_0_is_valid_only_for_listening() -> None:
    assert Address.parse("127.0.0.1:0", any_port=True) == Address("127.0.0.1", 0)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_raises_address_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address
