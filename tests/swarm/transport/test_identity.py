from __future__ import annotations

import ssl
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarm.errors import ConfigError, WrongPeer
from swarm.transport.address import PEER_ID
from swarm.transport.identity import (
    Identity,
    locked_default_identity,
    locked_identity,
    peer_id_of,
    peer_id_of_certificate,
    verify_signature,
)


def other_key() -> bytes:
    return generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_a_peer_id_is_valid_in_an_address() -> None:
    identity = Identity.generate()
    assert PEER_ID.fullmatch(identity.peer_id)
    assert identity.peer_id == peer_id_of(identity.public_key)
    assert peer_id_of(bytes(32)) == "mzuhvlpymk6xo3epygfy5h4oeaejofef"


def test_a_signature_is_valid_only_for_its_key_and_message() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"message")
    assert verify_signature(identity.public_key, signature, b"message")
    assert not verify_signature(identity.public_key, signature, b"another")
    assert not verify_signature(other.public_key, signature, b"message")
    assert not verify_signature(identity.public_key, b"short", b"message")
    assert not verify_signature(b"short", signature, b"message")


def test_the_certificate_proves_the_id() -> None:
    identity = Identity.generate()
    der = ssl.PEM_cert_to_DER_cert(identity.certificate_pem().decode())
    assert peer_id_of_certificate(der) == identity.peer_id


def test_an_invalid_certificate_raises_wrong_peer() -> None:
    with pytest.raises(WrongPeer, match="cannot be read"):
        peer_id_of_certificate(b"garbage")


def test_the_key_is_never_shown() -> None:
    assert "Ed25519" not in repr(Identity.generate())


def test_a_key_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.pem"]


def test_processes_that_create_a_key_at_the_same_time_get_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    code = (
        "import sys, pathlib, swarm.transport.identity\n"
        "print(swarm.transport.identity.Identity.load_or_create(pathlib.Path(sys.argv[1])).peer_id)"
    )

    def in_a_process(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        return done.stdout

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(in_a_process, range(3)))) == 1


def test_a_file_without_a_valid_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    for content, reason in ((b"not a key", "not a private key in PEM"), (other_key(), "another kind of key")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{path} .*{reason}"):
            Identity.load_or_create(path)
    with pytest.raises(ConfigError, match="cannot be read or made"):
        Identity.load_or_create(path / "below a file")


def test_two_running_peers_never_share_a_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    with (
        locked_identity(path) as identity,
        pytest.raises(ConfigError, match="in use by another peer"),
        locked_identity(path),
    ):
        pass
    with locked_identity(path) as again:
        assert again.peer_id == identity.peer_id


def test_a_restarted_peer_gets_its_id_again_and_a_second_peer_gets_another(tmp_path: Path) -> None:
    with locked_default_identity(tmp_path) as first, locked_default_identity(tmp_path) as second:
        assert first.peer_id != second.peer_id
    with locked_default_identity(tmp_path) as again:
        assert again.peer_id == first.peer_id


def test_an_invalid_default_key_is_named_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "identity-0.pem").write_bytes(b"not a key")
    with pytest.raises(ConfigError, match=r"identity-0\.pem"), locked_default_identity(tmp_path):
        pass
