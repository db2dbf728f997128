"""A swarm on this machine: real peers as child processes, for the demo, tests and benchmarks.

Each member is `swarm join --json` or `swarm bootstrap --json` in its own process group. It ends with this process
(`swarm.app.parent_watch`) and writes JSON lines to one file, its log to another. This module uses neither threads nor
an event loop: synchronous and asynchronous callers can use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from swarm.errors import PeerFailed, PeerStalled
from swarm.model.spans import LayerRange
from swarm.process.child_process import module_command, module_environment

LISTENING, ANNOUNCED = "listening", "announced"
_TICK_S = 0.05
_GRACE_S = 6.0
_LOG_TAIL_LINES = 12


@dataclass(kw_only=True)
class Member:
    """One process of a local swarm. `events` holds the JSON lines that `poll` has read."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    span: LayerRange | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def poll(self) -> list[dict[str, Any]]:
        """Read and return the lines that were written since the last call."""
        with self.output.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        new = [json.loads(line) for line in whole.splitlines() if line.strip()]
        self.events.extend(new)
        return new

    def event(self, phase: str) -> dict[str, Any] | None:
        """The last event of this phase, or None."""
        return next((event for event in reversed(self.events) if event.get("phase") == phase), None)

    @property
    def address(self) -> str:
        """HOST:PORT#PEER_ID at which it listens. Raises PeerFailed before it has reported it."""
        for event in self.events:
            if "address" in event:
                return str(event["address"])
        raise PeerFailed(f"{self.name} has not reported its address yet; its log is {self.log}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the peer but not to its daemon, which the peer stops itself."""
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to its process group, and wait until the peer has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Progress = Callable[[Member, dict[str, Any]], None]
"""Called with each event of each member."""


class LocalSwarm:
    """The members of one swarm. A context manager: its exit ends every process.

    Start members from the main thread: the kernel ends each member with the thread that started it.
    `folder` gets logs, outputs and identities. `options` are passed to every peer, for example
    `["--precision", "accuracy"]`.
    """

    def __init__(self, folder: Path, *, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.members: list[Member] = []
        self._options = tuple(options)
        self._environment = module_environment()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def addresses(self) -> list[str]:
        """The addresses of the members that are alive."""
        return [member.address for member in self.members if member.alive]

    def serve(
        self,
        package: str | Path,
        spans: Sequence[LayerRange | str],
        *,
        progress: Progress = lambda member, event: None,
    ) -> list[Member]:
        """Start a peer for each span and wait until all have announced. The first peer starts the swarm if needed.

        Raises what `wait` raises.
        """
        members: list[Member] = []
        for span in spans:
            if not self.members:
                members.append(self.join(package, span))
                self.wait(members, phase=LISTENING, progress=progress)
            else:
                members.append(self.join(package, span, initial=[self.members[0].address]))
        self.wait(members, progress=progress)
        return members

    def join(
        self,
        package: str | Path,
        span: LayerRange | str = "auto",
        *,
        initial: Iterable[str] = (),
        options: Sequence[str] = (),
        name: str = "",
        prefix: Sequence[str] = (),
        listen: str = "",
    ) -> Member:
        """Start a peer and return at once. `prefix` precedes the command: `ip netns exec NAME`, `taskset ...`."""
        name = name or f"peer-{len(self.members)}"
        command = ["join", str(package), "--layers", str(span), *self._common_options(name, initial, listen)]
        return self._start(name, [*command, *self._options, *options], prefix, span)

    def bootstrap(self, *, listen: str = "") -> Member:
        """Start a member without layers and return at once."""
        name = f"bootstrap-{len(self.members)}"
        return self._start(name, ["bootstrap", *self._common_options(name, (), listen)])

    def wait(
        self,
        members: Iterable[Member] | None = None,
        *,
        phase: str = ANNOUNCED,
        timeout: float = 180.0,
        progress: Progress = lambda member, event: None,
    ) -> None:
        """Wait until each of `members` (default: all) has reached `phase`. `progress` is called with each event.

        Raises PeerFailed with the end of the log if a member ends before that, PeerStalled after `timeout` seconds.
        """
        waiting = list(self.members if members is None else members)
        deadline = time.monotonic() + timeout
        while waiting:
            for member in list(waiting):
                was_alive = member.alive  # Read before `poll`, which then reads everything a dead member wrote.
                for event in member.poll():
                    progress(member, event)
                if member.event(phase) is not None:
                    waiting.remove(member)
                elif not was_alive:
                    raise PeerFailed(
                        f"{member.name} ended with exit code {member.process.returncode} before it was {phase}; "
                        f"the end of its log {member.log}:\n{member.log_tail()}"
                    )
            if waiting and time.monotonic() > deadline:
                member = waiting[0]
                raise PeerStalled(
                    f"{member.name} is not {phase} after {timeout:.0f} s; the end of its log {member.log}:\n"
                    f"{member.log_tail()}"
                )
            if waiting:
                time.sleep(_TICK_S)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End all members: SIGINT, SIGTERM after `grace_s`, SIGKILL 2 s later. If interrupted, it kills at once."""
        try:
            for number, timeout_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, 2.0)):
                for member in self.members:
                    member.signal(number)
                if self._all_ended(timeout_s):
                    break
        finally:
            with _signals_deferred():
                for member in self.members:
                    member.kill()

    def _all_ended(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while any(member.alive for member in self.members):
            if time.monotonic() > deadline:
                return False
            time.sleep(_TICK_S)
        return True

    def _common_options(self, name: str, initial: Iterable[str], listen: str) -> list[str]:
        identity = self.folder / f"{name}.pem"
        options = ["--listen", listen or "127.0.0.1:0", "--identity", str(identity), "--name", name, "--json"]
        return options + [word for address in initial for word in ("--initial-peer", address)]

    def _start(
        self, name: str, command: Sequence[str], prefix: Sequence[str] = (), span: LayerRange | str | None = None
    ) -> Member:
        output, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        whole_command = [*prefix, *module_command("swarm.app.parent_watch"), str(os.getpid()), *command]
        fixed_span = span if isinstance(span, LayerRange) else None
        # A signal between the start of the process and `members.append` would leave it running.
        with output.open("wb") as out, log.open("ab") as err, _signals_deferred():
            process = subprocess.Popen(
                whole_command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                process_group=0,  # Ctrl-C at the terminal reaches this process but not its peers.
            )
            member = Member(name=name, process=process, output=output, log=log, span=fixed_span)
            self.members.append(member)
        return member


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends. For short operations that must not be interrupted.

    It replaces the handlers: signals blocked in this thread would be delivered to another thread of this process.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only.
        yield
        return
    deferred: list[int] = []
    waiting = True
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None is a handler that Python did not install: it stays.
    handlers = {number: handler for number, handler in before.items() if handler is not None}

    def on_signal(number: int, _: FrameType | None) -> None:
        if waiting:
            deferred.append(number)
            return
        # The handlers are being restored now. An exception of the real handler may prevent this one's removal.
        signal.signal(number, handlers[number])
        signal.raise_signal(number)

    try:
        for number in handlers:
            signal.signal(number, on_signal)
        yield
    finally:
        waiting = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in deferred:
            signal.raise_signal(number)
