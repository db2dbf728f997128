"""One libp2p daemon (hivemind's `p2pd`) as a child process that never outlives this process.

hivemind can start the daemon itself. But then the daemon survives its parent, receives the terminal's Ctrl-C first, and
has another key and port after each start. So this module starts it, and hivemind gets the path of its control socket.
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
_START_TIMEOUT_S = 15.0
_EXIT_TIMEOUT_S = 2.0
_LIBP2P_ED25519 = bytes([0x08, 0x01, 0x12, 0x40])  # PrivateKey{type: Ed25519, data: 64 bytes} in protobuf
_IDENTIFY = bytes([2, 0x08, 0x00])  # Request{type: IDENTIFY} in protobuf, after its length
_PREFIX = "swarm-dht-"
_MIN_STALE_AGE_S = 60.0
_SOCKET_PATH_LIMIT = 100  # sockaddr_un holds 108

# Runs in the child before p2pd: makes the kernel send SIGKILL when the thread that started it, the event loop's, ends.
# `preexec_fn` could do the same, but may deadlock in a process with threads.
_LAUNCHER = (
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
    """Split `/ip4/HOST/tcp/PORT/p2p/ID` into TCP multiaddress and libp2p id. Raises AddressError quoting the text."""
    match = _MULTIADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise AddressError(f"{text[:120]!r} is not an address of a DHT node; one looks like /ip4/HOST/tcp/PORT/p2p/ID")
    return match[1], match[3]


def claim_port(host: str, port: int) -> int:
    """Return `port` if it is not in use, or a free port for 0. Raises DirectoryError.

    p2pd itself shares a port in use without an error, because it sets SO_REUSEPORT.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # With SO_REUSEADDR, connections of a daemon that has just ended do not block the port.
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
    """Find hivemind's p2pd without importing hivemind. Raises DirectoryError."""
    spec = find_spec("hivemind")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        binary = Path(folder) / "hivemind_cli" / "p2pd"
        if binary.is_file():
            return binary
    raise DirectoryError("hivemind's daemon p2pd is not installed; install hivemind again (Linux or WSL2 only)")


def generate_key() -> bytes:
    """A fresh private key in libp2p's format. The key determines the daemon's libp2p id."""
    key = Ed25519PrivateKey.generate()
    return _LIBP2P_ED25519 + key.private_bytes_raw() + key.public_key().public_bytes_raw()


class Daemon:
    """A running p2pd. `control` is its control socket as a multiaddress."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._log_task: asyncio.Task[None] | None = None
        self.control = f"/unix{_control_socket(folder)}"

    @classmethod
    async def start(cls, *, key: bytes, listen: Sequence[str], announce: Sequence[str] = ()) -> Daemon:
        """Start p2pd and wait until it accepts connections.

        `listen` and `announce` are TCP multiaddresses. Raises DirectoryError with the last line that p2pd printed.
        """
        binary = find_binary()
        folder = _private_folder()
        try:
            (folder / "key").write_bytes(key)
            arguments = _arguments(folder, listen, announce)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,  # keeps Ctrl-C at the terminal from reaching the daemon
            )
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise DirectoryError(f"the DHT daemon {binary} cannot be started: {error}") from error
            raise
        daemon = cls(process, folder)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await daemon._wait_ready()
        except BaseException as error:
            await daemon.kill_and_wait()
            if isinstance(error, TimeoutError):
                raise DirectoryError(
                    f"the DHT daemon {binary} did not start within {_START_TIMEOUT_S:.0f} s"
                ) from error
            raise
        daemon._log_task = asyncio.create_task(daemon._log_lines(), name="p2pd output")
        return daemon

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the process to end. Returns its exit code, negative for a signal."""
        return await self._process.wait()

    async def responds(self, timeout: float) -> bool:
        """Whether the daemon answers on its control socket. A hanging process is alive but does not answer."""
        writer = None
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(_control_socket(self._folder))
                writer.write(_IDENTIFY)
                return bool(await reader.read(1))
        except OSError:  # TimeoutError is one
            return False
        finally:
            if writer is not None:
                writer.close()

    def kill(self) -> None:
        """Send SIGKILL, without waiting. It works on a hanging daemon, and cannot be cancelled."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._log_task is not None:
            self._log_task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def kill_and_wait(self) -> None:
        """`kill`, then wait for the exit, which closes the pipes while the event loop still runs."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await self._process.wait()

    async def stop(self) -> None:
        """End the daemon with SIGTERM, after two seconds with SIGKILL. It is dead afterwards, even if cancelled."""
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_TIMEOUT_S):
                        await self._process.wait()
        finally:
            await self.kill_and_wait()

    async def _wait_ready(self) -> None:
        last_line = b""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            last_line = line
            if line.startswith(_READY):
                (self._folder / "key").unlink(missing_ok=True)
                return
        output = last_line.decode(errors="replace").strip() or "it printed nothing"
        raise DirectoryError(f"the DHT daemon ended at its start: {output[:300]}")

    async def _log_lines(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # the line is longer than the reader's limit and was dropped
            if not line:
                return
            _log.debug("p2pd: %s", line.decode(errors="replace").rstrip())


def _arguments(folder: Path, listen: Sequence[str], announce: Sequence[str]) -> list[str]:
    arguments = [
        f"-listen=/unix{_control_socket(folder)}",
        f"-id={folder / 'key'}",
        f"-hostAddrs={','.join(listen)}",
        f"-persistentConnMaxMsgSize={MAX_MESSAGE_BYTES}",
        "-dhtServer=1",
        "-connManager=1",
        "-tls=1",
        # No relay for other nodes, and no port mapping on the router.
        "-relay=0",
        "-relayService=0",
        "-autonat=0",
        "-natPortMap=0",
    ]
    return [*arguments, f"-announceAddrs={','.join(announce)}"] if announce else arguments


def remove_stale_folders(parent: Path) -> None:
    """Remove the folders in `parent` of daemons that have ended. A killed peer cannot remove its own."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            # The folder is 0700, so only its owner can create the socket. The daemon of a new one may not listen yet.
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _MIN_STALE_AGE_S:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(str(_control_socket(folder)))
        except (ConnectionRefusedError, FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # the daemon is alive but busy


def _private_folder() -> Path:
    """A new folder with mode 0700, because access to the control socket is control over the daemon."""
    remove_stale_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(_control_socket(folder))) > _SOCKET_PATH_LIMIT:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return folder


def _control_socket(folder: Path) -> Path:
    return folder / "control.sock"
