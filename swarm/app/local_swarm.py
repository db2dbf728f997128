"""A swarm on this machine: real peers as child processes, for the demo, tests and benchmarks.

Each member is `swarm join --json` (or `swarm bootstrap --json`) in a process group of its own, tied to
this process by `swarm.app.parent_watch`. It writes JSON lines to one file and its log to another. Nothing here
has a thread or an event loop, so it serves synchronous and asynchronous callers alike.
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

STARTED, LISTENING, ANNOUNCED = "started", "listening", "announced"
_TICK_S = 0.05
_GRACE_S = 6.0
_LOG_TAIL = 12


@dataclass(kw_only=True)
class Member:
    """One process of a local swarm. `events` holds the JSON lines that it has written so far."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    span: LayerRange | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def poll(self) -> list[dict[str, Any]]:
        """The lines that are new since the last call."""
        with self.output.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        fresh = [json.loads(line) for line in whole.splitlines() if line.strip()]
        self.events.extend(fresh)
        return fresh

    def event(self, phase: str) -> dict[str, Any] | None:
        """The last line of this phase."""
        return next((event for event in reversed(self.events) if event.get("phase") == phase), None)

    @property
    def address(self) -> str:
        """HOST:PORT#PEER_ID at which it listens. Raises PeerFailed while it has not said so."""
        for event in self.events:
            if "address" in event:
                return str(event["address"])
        raise PeerFailed(f"{self.name} has not said at which address it listens; its log is {self.log}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL:])

    def signal(self, number: signal.Signals) -> None:
        """To the peer itself, not to its daemon, which it ends on its own."""
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, for everything in its process group, and wait until the peer is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Progress = Callable[[Member, dict[str, Any]], None]
"""Hears each line that a member writes."""


class LocalSwarm:
    """Members of one swarm. Use it as a context: leaving it ends every process.

    Start members from the main thread: the kernel ends each with the thread that it was started from.
    `folder` gets logs, outputs and identities. `options` go to every peer, for example
    `["--precision", "accuracy"]`. `environment` is added to this process's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.members: list[Member] = []
        self._host = host
        self._options = tuple(options)
        self._environment = module_environment() | (environment or {})
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def addresses(self) -> list[str]:
        """Of the members that live."""
        return [member.address for member in self.members if member.alive]

    def serve(
        self,
        package: str | Path,
        spans: Sequence[LayerRange | str],
        *,
        options: Sequence[str] = (),
        timeout: float = 180.0,
        progress: Progress = lambda member, event: None,
    ) -> list[Member]:
        """A peer for each span; returns when all have announced. The first begins the swarm if it has no member.

        Raises what `wait` raises.
        """
        members: list[Member] = []
        for span in spans:
            if not self.members:
                members.append(self.join(package, span, options=options))
                self.wait(members, phase=LISTENING, timeout=timeout, progress=progress)
            else:
                initial = [self.members[0].address]
                members.append(self.join(package, span, initial=initial, options=options))
        self.wait(members, timeout=timeout, progress=progress)
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
        """Start a peer and return at once. `prefix` goes before the command: `ip netns exec NAME`, `taskset ...`."""
        name = name or f"peer-{len(self.members)}"
        command = ["join", str(package), "--layers", str(span), *self._common(name, initial, listen)]
        return self._start(name, [*command, *self._options, *options], prefix, span)

    def bootstrap(self, *, initial: Iterable[str] = (), prefix: Sequence[str] = (), listen: str = "") -> Member:
        """Start a member without layers and return at once."""
        name = f"bootstrap-{len(self.members)}"
        return self._start(name, ["bootstrap", *self._common(name, initial, listen)], prefix)

    def wait(
        self,
        members: Iterable[Member] | None = None,
        *,
        phase: str = ANNOUNCED,
        timeout: float = 180.0,
        progress: Progress = lambda member, event: None,
    ) -> None:
        """Until each of `members` (all, where none are named) has reached `phase`; `progress` hears every line.

        Raises PeerFailed with the end of its log if one ends before, PeerStalled after `timeout` seconds.
        """
        waiting = list(self.members if members is None else members)
        deadline = time.monotonic() + timeout
        while waiting:
            for member in list(waiting):
                lived = member.alive  # asked first: what it wrote before its end is then read below
                for event in member.poll():
                    progress(member, event)
                if member.event(phase) is not None:
                    waiting.remove(member)
                elif not lived:
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
        """End everything: SIGINT, SIGTERM after `grace_s`, SIGKILL 2 s later. Interrupted, it kills at once."""
        try:
            for number, patience in ((signal.SIGINT, grace_s), (signal.SIGTERM, 2.0)):
                for member in self.members:
                    member.signal(number)
                if self._gone(patience):
                    break
        finally:
            with _uninterrupted():
                for member in self.members:
                    member.kill()

    def _gone(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while any(member.alive for member in self.members):
            if time.monotonic() > deadline:
                return False
            time.sleep(_TICK_S)
        return True

    def _common(self, name: str, initial: Iterable[str], listen: str) -> list[str]:
        identity = self.folder / f"{name}.pem"
        options = ["--listen", listen or f"{self._host}:0", "--identity", str(identity), "--name", name, "--json"]
        return options + [word for address in initial for word in ("--initial-peer", address)]

    def _start(
        self, name: str, command: Sequence[str], prefix: Sequence[str], span: LayerRange | str | None = None
    ) -> Member:
        output, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        words = [*prefix, *module_command("swarm.app.parent_watch"), str(os.getpid()), *command]
        fixed = span if isinstance(span, LayerRange) else None
        with output.open("wb") as out, log.open("ab") as err, _uninterrupted():  # or nobody would end it
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                process_group=0,  # a Ctrl-C at the terminal is for whoever started the swarm, not for peers
            )
            member = Member(name=name, process=process, output=output, log=log, span=fixed)
            self.members.append(member)
        return member


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait until the block is over. For what is short and must not be left half done.

    By their handlers: blocked in this thread, they would be given to another one of this process.
    """
    if threading.current_thread() is not threading.main_thread():  # signals interrupt that one alone
        yield
        return
    came: list[int] = []
    waiting = True
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None is one that is not Python's: it stays
    handlers = {number: handler for number, handler in before.items() if handler is not None}

    def hear(number: int, _: FrameType | None) -> None:
        if waiting:
            came.append(number)
            return
        # it comes while the handlers are put back, and what it raises may leave this one where it is
        signal.signal(number, handlers[number])
        signal.raise_signal(number)

    try:
        for number in handlers:
            signal.signal(number, hear)
        yield
    finally:
        waiting = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)
