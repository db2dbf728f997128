"""Peers of one test module, started and killed as its tests need them; and a log of a client's events."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client.events import Event, OnEvent, Stage, ignore_event
from swarm.app.local_swarm import ANNOUNCED, LISTENING, LocalSwarm, Member

_THROTTLE_SCRIPT = """
import os, signal, sys, time
pid, share, period = int(sys.argv[1]), float(sys.argv[2]), 0.1
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
try:
    while True:
        for number, seconds in ((signal.SIGSTOP, (1 - share) * period), (signal.SIGCONT, share * period)):
            os.kill(pid, number)
            time.sleep(seconds)
except ProcessLookupError:
    sys.exit()
finally:
    os.kill(pid, signal.SIGCONT)
"""


@dataclass(frozen=True)
class PeerSpec:
    """The description of a peer: `name` serves `span` of the model in `package`."""

    name: str
    span: str
    package: Path
    options: tuple[str, ...] = ()


class PeerSet:
    """A swarm of exactly the peers that the last `start_exactly` named. Peers that it names again keep running."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self._swarm = swarm
        self._members: dict[PeerSpec, Member] = {}

    @property
    def addresses(self) -> list[str]:
        """The addresses of the peers that run and listen."""
        return [member.address for member in self._listening(self._members)]

    def __getitem__(self, name: str) -> Member:
        return next(member for spec, member in self._members.items() if spec.name == name)

    def pick(self, specs: Sequence[PeerSpec], count: int) -> list[PeerSpec]:
        """`count` of `specs`, peers that run first."""
        return sorted(specs, key=lambda spec: not self._is_alive(spec))[:count]

    def start_exactly(self, *specs: PeerSpec) -> None:
        """Start missing peers, kill all others, and wait until these have announced."""
        for spec in list(self._members):
            if spec not in specs or not self._is_alive(spec):
                self._members.pop(spec).kill()
        for spec in specs:
            if spec not in self._members:
                first = not self._members
                member = self.start(spec)
                if first:
                    self._swarm.wait([member], phase=LISTENING)
        self._swarm.wait(self._members.values())

    def start(self, spec: PeerSpec, *, listen: str = "") -> Member:
        """Start or restart a peer without waiting for it."""
        others = [other for other in self._members if other != spec]
        initial = [member.address for member in self._listening(others)][:1]
        member = self._swarm.join(
            spec.package, spec.span, initial=initial, options=spec.options, name=spec.name, listen=listen
        )
        self._members[spec] = member
        return member

    def wait(self, spec: PeerSpec, phase: str = ANNOUNCED) -> None:
        """Wait until the peer has reached `phase`."""
        self._swarm.wait([self._members[spec]], phase=phase)

    def _listening(self, specs: Iterable[PeerSpec]) -> list[Member]:
        members = [self._members[spec] for spec in specs]
        return [member for member in members if member.alive and member.event(LISTENING) is not None]

    def _is_alive(self, spec: PeerSpec) -> bool:
        return spec in self._members and self._members[spec].alive


@contextlib.contextmanager
def open_peer_set(folder: Path) -> Iterator[PeerSet]:
    """An empty set. Its peers use one thread each and are killed at the end."""
    options = ["--threads", "1", "--kv-tokens", "8192", "--grace", "1"]
    with LocalSwarm(folder, options=options) as swarm:
        yield PeerSet(swarm)


@contextlib.contextmanager
def stopped(member: Member) -> Iterator[None]:
    """Stop the process with SIGSTOP; continue it at the end."""
    member.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        member.signal(signal.SIGCONT)


@contextlib.contextmanager
def slowed(member: Member, share: float) -> Iterator[None]:
    """Let the peer run for only `share` of each tenth of a second."""
    command = [sys.executable, "-c", _THROTTLE_SCRIPT, str(member.process.pid), str(share)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as throttle:
        try:
            yield
            assert throttle.poll() is None, "the throttle ended early"
        finally:
            throttle.terminate()
            throttle.wait()
            member.signal(signal.SIGCONT)


class EventLog:
    """Records a client's events: `SwarmClient.connect(on_event=event_log.on_event)`."""

    def __init__(self, forward_to: OnEvent = ignore_event) -> None:
        """`forward_to` gets each event too."""
        self.events: list[Event] = []
        self.forward_to = forward_to

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.forward_to(event)

    def of(self, *stages: Stage) -> list[Event]:
        return [event for event in self.events if event.stage in stages]

    @property
    def routes(self) -> list[list[str]]:
        """The names of the peers on each route that was opened."""
        return [peer_names(event.text) for event in self.of(Stage.CONNECTED)]


def peer_names(route: str) -> list[str]:
    """The names of the peers in a route's text, such as `anna 0:15 → ben 15:30`."""
    return route.replace("→", " ").replace("⇢", " ").split()[::2]


def peer_spans(route: str) -> list[str]:
    """The layers in a route's text."""
    return route.replace("→", " ").replace("⇢", " ").split()[1::2]
