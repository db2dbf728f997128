"""A peer's Ed25519 key: it signs the peer's notices and TLS certificate, and its fingerprint is the peer id."""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from swarm.errors import ConfigError, WrongPeer

_EPOCH = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
_MAX_IDENTITIES = 64


def peer_id_of(public_key: bytes) -> str:
    """The peer id of a raw Ed25519 key: the first 160 bits of its SHA-256, as 32 characters of base32."""
    return base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()


def peer_id_of_certificate(der: bytes) -> str:
    """The peer id of a TLS certificate. Raises WrongPeer if it has no Ed25519 key."""
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except ValueError as error:
        raise WrongPeer(f"the other side's certificate cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise WrongPeer("the other side is not a peer: the key of its certificate is not Ed25519")
    return peer_id_of(key.public_bytes_raw())


def verify_signature(public_key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Identity:
    """An Ed25519 key pair, stored in a file that only its owner can read."""

    key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key at `path`, or create one there (mode 0600). Raises a ConfigError that names the path."""
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                identity = cls.generate()
                temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(identity.key_pem())
                # link() fails if another process has created the file meanwhile: its key is then used.
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
                temporary.unlink()
            key = load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise ConfigError(f"identity {path} cannot be read or made: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"identity {path} is not a private key in PEM: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"identity {path} holds another kind of key than Ed25519; delete it to create a new one")
        return cls(key)

    @property
    def public_key(self) -> bytes:
        """32 raw bytes."""
        return self.key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self.key.sign(message)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def certificate_pem(self) -> bytes:
        """A self-signed certificate without a host name: the other side checks the fingerprint of its key."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.peer_id)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(1)
            .not_valid_before(_EPOCH)
            .not_valid_after(_END)
            .sign(self.key, None)
        )
        return certificate.public_bytes(Encoding.PEM)


@contextlib.contextmanager
def locked_identity(path: Path) -> Iterator[Identity]:
    """Lock the key at `path` for this process until the block ends, so that two peers never share an id.

    Raises ConfigError if another running process has locked it.
    """
    identity = Identity.load_or_create(path)
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"identity {path} is in use by another peer that runs here") from error
        yield identity


@contextlib.contextmanager
def locked_default_identity(folder: Path) -> Iterator[Identity]:
    """Lock the first key in `folder` that no running process has locked: a restarted peer gets its id again."""
    with contextlib.ExitStack() as stack:
        for slot in range(_MAX_IDENTITIES):
            try:
                identity = stack.enter_context(locked_identity(folder / f"identity-{slot}.pem"))
            except ConfigError as error:
                if isinstance(error.__cause__, BlockingIOError):
                    continue
                raise
            yield identity
            return
        raise ConfigError(f"all {_MAX_IDENTITIES} identities in {folder} are in use; name another with --identity")
