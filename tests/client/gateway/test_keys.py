"""API keys, and the addresses where a gateway may listen without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from client.gateway.config import GatewayConfig, check_exposure
from client.gateway.keys import Keys
from swarm.errors import ConfigError
from swarm.transport.address import Address


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the office\nsk-first-key\n\n  sk-second-key  \n")
    keys = Keys.read(path)
    assert len(keys) == 2
    assert "sk-second-key" in keys
    assert "sk-second-ke" not in keys
    assert "# for the office" not in keys
    assert None not in keys


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "has a space in it\n", "sk-\N{SNOWMAN}-key-key\n"])
def test_an_error_names_the_file_and_never_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        Keys.read(path)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys.read(tmp_path / "none")


def test_repr_shows_no_key() -> None:
    shown = repr(GatewayConfig(keys=Keys(["sk-very-secret"])))
    assert "secret" not in shown


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "gateway.example", "127.site.example"])
def test_a_public_address_needs_a_key_or_no_auth(host: str) -> None:
    place = Address(host, 8000)
    with pytest.raises(ConfigError, match="--no-auth"):
        check_exposure(place, None, no_auth=False)
    check_exposure(place, Keys(["sk-some-key"]), no_auth=False)
    check_exposure(place, None, no_auth=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(Address(host, 8000), None, no_auth=False)


def test_an_invalid_option_is_named() -> None:
    with pytest.raises(ConfigError, match="max_concurrent"):
        GatewayConfig(max_concurrent=0)
    with pytest.raises(ConfigError, match=r"site\.example"):
        GatewayConfig(allow_origins=("site.example",))
