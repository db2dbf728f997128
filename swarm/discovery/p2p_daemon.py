"""One libp2p daemon (hivemind's `p2pd`) as a child process that never outlives us.

hivemind would start it itself, but then nothing ties it to our life (p2pd does not watch its parent),
a Ctrl-C at the terminal reaches it before us, and its key and port change with every start. So we
start it, and hivemind is only told where its control socket is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import AddressError, DirectoryError

MAX_MESSAGE_BYTES = 4 << 20
_READY = b"Peer ID:"
_GRACE_S = 2.0
_LIBP2P_ED25519 = bytes([0x08, 0x01, 0x12, 0x40])  # PrivateKey{type: Ed25519, data: 64 bytes} in protobuf
_IDENTIFY = bytes([2, 0x08, 0x00])  # Request{type: IDENTIFY} in protobuf, after its length
_PREFIX = "swarm-dht-"
_YOUNG_S = 60.0
_SOCKET_PATH_LIMIT = 100  # sockaddr_un holds 108

# Runs in the child before p2pd does: SIGKILL at the death of the thread that started it, our event loop's.
# `preexec_fn` could do it too, but may deadlock in a process that has threads.
_TIED = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)

_MULTIADDRESS = re.compile(
    r"(/(?:ip4|ip6|dns|dns4|dns6)/[^/\s]{1,253}/tcp/(\d{1,5}))/p2p/([1-9A-HJ-NP-Za-km-z]{20,80})"
)

_log = logging.getLogger(__name__)


def tcp_multiaddress(host: str, port: int) -> str:
    """
    >>> tcp_multiaddress("10.0.0.7", 4001)
    '/ip4/10.0.0.7/tcp/4001'
    """
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


def split_multiaddress(text: str) -> tuple[str, str]:
    """Place and libp2p peer id of `/ip4/HOST/tcp/PORT/p2p/ID`. Raises AddressError that quotes the text."""
    match = _MULTIADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise AddressError(f"{text[:120]!r} is not an address of a DHT node; one looks like /ip4/HOST/tcp/PORT/p2p/ID")
    return match[1], match[3]


def claim_port(host: str, port: int) -> int:
    """`port` if nobody listens there, or a free one for 0. Raises DirectoryError.

    p2pd itself would share a taken port in silence (it sets SO_REUSEPORT).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # fails only where somebody listens; a daemon that has just ended is no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DirectoryError(
                f"the DHT cannot listen at {host} port {port}: {error.strerror}; choose another address or port 0"
            ) from error
        free: int = probe.getsockname()[1]
        return free


def find_binary() -> Path:
    """Where hivemind keeps p2pd; found without importing hivemind. Raises DirectoryError."""
    spec = find_spec("hivemind")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        binary = Path(place) / "hivemind_cli" / "p2pd"
        if binary.is_file():
            return binary
    raise DirectoryError("hivemind's daemon p2pd is not installed; install hivemind again (Linux or WSL2 only)")


def generate_key() -> bytes:
    """A fresh private key in libp2p's format. Whoever keeps it keeps the daemon's peer id."""
    key = Ed25519PrivateKey.generate()
    return _LIBP2P_ED25519 + key.private_bytes_raw() + key.public_key().public_bytes_raw()


class Daemon:
    """A running p2pd. `control` is its control socket as a multiaddress."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._lines: asyncio.Task[None] | None = None
        self.control = f"/unix{_socket_in(folder)}"

    @classmethod
    async def start(
        cls, *, key: bytes, listen: Sequence[str], announce: Sequence[str] = (), timeout: float = 15.0
    ) -> Daemon:
        """Start it and wait until it takes connections.

        `listen` and `announce` are TCP multiaddresses. Raises DirectoryError with p2pd's last words.
        """
        binary = find_binary()
        folder = _private_folder()
        try:
            (folder / "key").write_bytes(key)
            arguments = _arguments(folder, listen, announce)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), str(binary), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,  # Ctrl-C is for us; we end it when we are done with it
            )
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise DirectoryError(f"the DHT daemon {binary} cannot be started: {error}") from error
            raise
        daemon = cls(process, folder)
        try:
            async with asyncio.timeout(timeout):
                await daemon._wait_ready()
        except BaseException as error:
            await daemon.end()
            if isinstance(error, TimeoutError):
                raise DirectoryError(f"the DHT daemon {binary} did not start within {timeout:.0f} s") from error
            raise
        daemon._lines = asyncio.create_task(daemon._log_lines(), name="p2pd output")
        return daemon

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        return await self._process.wait()

    async def answers(self, timeout: float) -> bool:
        """Does it still do its work? A process may live and hang."""
        writer = None
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(_socket_in(self._folder))
                writer.write(_IDENTIFY)
                return bool(await reader.read(1))
        except OSError:  # TimeoutError is one
            return False
        finally:
            if writer is not None:
                writer.close()

    def kill(self) -> None:
        """SIGKILL now, without waiting. Nothing can prevent it: not a hung daemon, not a cancelled caller."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._lines is not None:
            self._lines.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self) -> None:
        """`kill`, then see it gone: its pipes are closed while the event loop still runs."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()

    async def stop(self) -> None:
        """Let it say goodbye to its peers, for two seconds at most. It is dead afterwards, even if cancelled."""
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GRACE_S):
                        await self._process.wait()
        finally:
            await self.end()

    async def _wait_ready(self) -> None:
        last = b""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            last = line
            if line.startswith(_READY):
                (self._folder / "key").unlink(missing_ok=True)
                return
        words = last.decode(errors="replace").strip() or "it said nothing"
        raise DirectoryError(f"the DHT daemon ended as it started: {words[:300]}")

    async def _log_lines(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # a line longer than the reader's limit: it was dropped, the next one may do
            if not line:
                return
            _log.debug("p2pd: %s", line.decode(errors="replace").rstrip())


def _arguments(folder: Path, listen: Sequence[str], announce: Sequence[str]) -> list[str]:
    arguments = [
        f"-listen=/unix{_socket_in(folder)}",
        f"-id={folder / 'key'}",
        f"-hostAddrs={','.join(listen)}",
        f"-persistentConnMaxMsgSize={MAX_MESSAGE_BYTES}",
        "-dhtServer=1",
        "-connManager=1",
        "-tls=1",
        # no service for strangers, and no hole in the router that nobody asked for
        "-relay=0",
        "-relayService=0",
        "-autonat=0",
        "-natPortMap=0",
    ]
    return [*arguments, f"-announceAddrs={','.join(announce)}"] if announce else arguments


def sweep(parent: Path) -> None:
    """Remove the folders below `parent` of daemons that are gone: a killed peer cannot remove its own."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            told = folder.lstat()
            # 0700 and ours: nobody else can have put a socket there; a young one may be about to listen
            if told.st_uid != os.getuid() or time.time() - told.st_mtime < _YOUNG_S:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(_socket_in(folder)))
        except (ConnectionRefusedError, FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, if too busy to answer


def _private_folder() -> Path:
    """Mode 0700: whoever reaches the control socket commands the daemon."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(_socket_in(folder))) > _SOCKET_PATH_LIMIT:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return folder


def _socket_in(folder: Path) -> Path:
    return folder / "control.sock"
