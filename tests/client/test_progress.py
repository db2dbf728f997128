from __future__ import annotations

import io

from rich.console import Console

from client.events import Event, Stage
from client.progress import Progress


class Screen:
    """What stdout and stderr got, in one order."""

    def __init__(self, *, terminal: bool) -> None:
        self.now = 0.0
        self.shown = io.StringIO()
        console = Console(file=self.shown, force_terminal=terminal, color_system=None, width=200)
        self.progress = Progress(console=console, output=self.shown, clock=lambda: self.now)

    def hear(self, stage: Stage, text: str, done: int = 0, total: int = 0) -> None:
        self.progress.hear(Event(stage=stage, text=text, done=done, total=total))


def test_what_takes_no_second_is_not_mentioned_in_a_file() -> None:
    screen = Screen(terminal=False)
    screen.hear(Stage.LOOKING, "looking")
    screen.hear(Stage.PREFILL, "reading the prompt", 128, 2000)
    assert screen.shown.getvalue() == ""


def test_a_file_gets_a_line_a_second() -> None:
    screen = Screen(terminal=False)
    for place in range(1, 11):
        screen.now = place * 0.5
        screen.hear(Stage.PREFILL, "reading the prompt", place * 100, 1000)
    shares = [line.split()[-1] for line in screen.shown.getvalue().splitlines()]
    assert shares == ["20%", "40%", "60%", "80%", "100%"]


def test_repairs_and_trust_are_always_said() -> None:
    screen = Screen(terminal=False)
    screen.hear(Stage.TRUSTED, "10.0.0.1:1 was taken on trust [really]")
    screen.hear(Stage.REPAIRING, "another route is needed")
    assert screen.shown.getvalue() == "10.0.0.1:1 was taken on trust [really]\nanother route is needed\n"


def test_a_message_in_the_middle_of_an_answer_begins_a_line() -> None:
    screen = Screen(terminal=True)
    screen.progress.write("The fox")
    screen.hear(Stage.REPAIRING, "another route is needed")
    screen.progress.write(" ran.")
    screen.progress.end_line()
    screen.progress.end_line()
    assert screen.shown.getvalue() == "The fox\nanother route is needed\n ran.\n"


def test_the_answer_is_never_mixed_with_what_goes_away() -> None:
    screen = Screen(terminal=True)
    with screen.progress as progress:
        screen.hear(Stage.ROUTING, "choosing a route")
        progress.write("The")
        screen.hear(Stage.ROUTING, "choosing a route")
        progress.write(" fox\n")
    assert screen.shown.getvalue().endswith("The fox\n")


def test_a_file_learns_what_is_waited_for_at_once_and_no_line_twice() -> None:
    screen = Screen(terminal=False)
    for now in range(2, 12):
        screen.now = float(now)
        screen.hear(Stage.ROUTING, "choosing a route")
        screen.hear(Stage.WAITING, "waiting for a peer: nobody serves layers 3:7")
    screen.hear(Stage.WAITING, "waiting for a peer: all are busy")
    assert screen.shown.getvalue().splitlines() == [
        "choosing a route",
        "waiting for a peer: nobody serves layers 3:7",
        "waiting for a peer: all are busy",
    ]
