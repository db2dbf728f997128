"""Peers of a module's own, by name, which come and go as its tests need; and what a client says meanwhile."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client.events import Event, OnEvent, Stage, unheard
from swarm.app.local_swarm import ANNOUNCED, LISTENING, LocalSwarm, Member

_DUTY = """
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
class House:
    """A peer that there should be: `name` serves `span` of the model in `package`."""

    name: str
    span: str
    package: Path
    options: tuple[str, ...] = ()


class Town:
    """A swarm whose members are who `populate` named last. Peers that stay are not started again."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self._swarm = swarm
        self._members: dict[House, Member] = {}

    @property
    def addresses(self) -> list[str]:
        """Of the peers that live and have said where."""
        return [member.address for member in self._listening(self._members)]

    def __getitem__(self, name: str) -> Member:
        return next(member for house, member in self._members.items() if house.name == name)

    def some(self, houses: Sequence[House], count: int) -> list[House]:
        """`count` of them, those that are there first."""
        return sorted(houses, key=lambda house: not self._lives(house))[:count]

    def populate(self, *houses: House) -> None:
        """Exactly these peers are there afterwards, and have announced. Those too many are killed."""
        for house in list(self._members):
            if house not in houses or not self._lives(house):
                self._members.pop(house).kill()
        for house in houses:
            if house not in self._members:
                first = not self._members
                member = self.start(house)
                if first:
                    self._swarm.wait([member], phase=LISTENING)
        self._swarm.wait(self._members.values())

    def start(self, house: House, *, listen: str = "") -> Member:
        """Start a peer, again where it was there before, and return at once."""
        others = [other for other in self._members if other != house]
        initial = [member.address for member in self._listening(others)][:1]
        member = self._swarm.join(
            house.package, house.span, initial=initial, options=house.options, name=house.name, listen=listen
        )
        self._members[house] = member
        return member

    def wait(self, house: House, phase: str = ANNOUNCED) -> None:
        """Until it has reached `phase`."""
        self._swarm.wait([self._members[house]], phase=phase)

    def _listening(self, houses: Iterable[House]) -> list[Member]:
        there = [self._members[house] for house in houses]
        return [member for member in there if member.alive and member.event(LISTENING) is not None]

    def _lives(self, house: House) -> bool:
        return house in self._members and self._members[house].alive


@contextlib.contextmanager
def town_in(folder: Path) -> Iterator[Town]:
    """An empty one. Its peers compute with one thread each and are gone afterwards."""
    options = ["--threads", "1", "--kv-tokens", "8192", "--grace", "1"]
    with LocalSwarm(folder, options=options) as swarm:
        yield Town(swarm)


@contextlib.contextmanager
def stopped(member: Member) -> Iterator[None]:
    """SIGSTOP now, SIGCONT in the end."""
    member.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        member.signal(signal.SIGCONT)


@contextlib.contextmanager
def slowed(member: Member, share: float) -> Iterator[None]:
    """The peer runs for `share` of the time and is stopped for the rest, ten times a second."""
    command = [sys.executable, "-c", _DUTY, str(member.process.pid), str(share)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as brake:
        try:
            yield
            assert brake.poll() is None, "nothing slowed the peer down"
        finally:
            brake.terminate()
            brake.wait()
            member.signal(signal.SIGCONT)


class Diary:
    """Hears a client's events: `SwarmClient.connect(on_event=diary.hear)`."""

    def __init__(self, then: OnEvent = unheard) -> None:
        """`then` hears each event too."""
        self.events: list[Event] = []
        self.then = then

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.then(event)

    def of(self, *stages: Stage) -> list[Event]:
        return [event for event in self.events if event.stage in stages]

    @property
    def routes(self) -> list[list[str]]:
        """The names along each route that was opened, in order."""
        return [names_on(event.text) for event in self.of(Stage.CONNECTED)]


def names_on(route: str) -> list[str]:
    """The peers' names in a route's text, such as `anna 0:15 → ben 15:30`."""
    return route.replace("→", " ").replace("⇢", " ").split()[::2]


def spans_on(route: str) -> list[str]:
    """The layers in a route's text."""
    return route.replace("→", " ").replace("⇢", " ").split()[1::2]
