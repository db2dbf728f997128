from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from client.events import Event, Stage
from client.generation.generate import FinishReason, Reply
from client.metrics import Metrics
from client.progress import Progress, describe
from client.speculation.speculation import SpeculationReport


class Screen:
    """Records stdout and stderr in one stream."""

    def __init__(self, *, terminal: bool) -> None:
        self.now = 0.0
        self.shown = io.StringIO()
        console = Console(file=self.shown, force_terminal=terminal, color_system=None, width=200)
        self.progress = Progress(console=console, output=self.shown, clock=lambda: self.now)

    def on_event(self, stage: Stage, text: str, done: int = 0, total: int = 0) -> None:
        self.progress.on_event(Event(stage=stage, text=text, done=done, total=total))


def test_off_a_terminal_nothing_is_printed_in_the_first_second() -> None:
    screen = Screen(terminal=False)
    screen.on_event(Stage.LOOKING, "looking")
    screen.on_event(Stage.PREFILL, "reading the prompt", 128, 2000)
    assert screen.shown.getvalue() == ""


def test_off_a_terminal_a_line_a_second_is_printed() -> None:
    screen = Screen(terminal=False)
    for place in range(1, 11):
        screen.now = place * 0.5
        screen.on_event(Stage.PREFILL, "reading the prompt", place * 100, 1000)
    shares = [line.split()[-1] for line in screen.shown.getvalue().splitlines()]
    assert shares == ["20%", "40%", "60%", "80%", "100%"]


def test_repairs_and_trusted_addresses_are_always_printed() -> None:
    screen = Screen(terminal=False)
    screen.on_event(Stage.TRUSTED, "10.0.0.1:1 was taken on trust [really]")
    screen.on_event(Stage.REPAIRING, "another route is needed")
    assert screen.shown.getvalue() == "10.0.0.1:1 was taken on trust [really]\nanother route is needed\n"


def test_off_a_terminal_the_loading_of_a_draft_is_printed_at_once() -> None:
    screen = Screen(terminal=False)
    screen.on_event(Stage.DRAFT, "loading the draft small")
    assert screen.shown.getvalue() == "loading the draft small\n"


def test_a_note_during_an_answer_begins_a_new_line() -> None:
    screen = Screen(terminal=True)
    screen.progress.write("The fox")
    screen.on_event(Stage.REPAIRING, "another route is needed")
    screen.progress.write(" ran.")
    screen.progress.end_line()
    screen.progress.end_line()
    assert screen.shown.getvalue() == "The fox\nanother route is needed\n ran.\n"


def test_the_status_line_is_cleared_before_the_answer() -> None:
    screen = Screen(terminal=True)
    with screen.progress as progress:
        screen.on_event(Stage.ROUTING, "choosing a route")
        progress.write("The")
        screen.on_event(Stage.ROUTING, "choosing a route")
        progress.write(" fox\n")
    assert screen.shown.getvalue().endswith("The fox\n")


def test_off_a_terminal_waiting_is_printed_at_once_and_no_line_twice() -> None:
    screen = Screen(terminal=False)
    for now in range(2, 12):
        screen.now = float(now)
        screen.on_event(Stage.ROUTING, "choosing a route")
        screen.on_event(Stage.WAITING, "waiting for a peer: no peer serves layers 3:7")
    screen.on_event(Stage.WAITING, "waiting for a peer: all are busy")
    assert screen.shown.getvalue().splitlines() == [
        "choosing a route",
        "waiting for a peer: no peer serves layers 3:7",
        "waiting for a peer: all are busy",
    ]


def test_the_line_after_an_answer_reports_speculation() -> None:
    def line_for(report: SpeculationReport) -> str:
        return describe(
            Reply(text="", token_ids=(), finish_reason=FinishReason.STOP, metrics=replace(METRICS, speculation=report))
        )

    windows = tuple((place, place % 5, 1 + place % 2) for place in range(9))
    report = SpeculationReport(
        draft="ngram", proposed=9, accepted=7, trips=4, tokens_a_trip=2.5, windows=windows, without=12.0, off=""
    )
    assert "7 of 9 guesses accepted (ngram), 2.5 tokens a trip, 12.0 tokens/s without (estimated)" in line_for(report)
    assert "guesses a window: ..., 3x2, 4, 0x2, 1, 2x2, 3" in line_for(report)
    assert "at the end" not in line_for(report)
    assert "without" not in line_for(replace(report, without=0.0))  # no estimate
    off = line_for(replace(report, proposed=0, accepted=0, windows=((1, 0, 1),), off="3% of the guesses were right"))
    assert "no guesses (ngram) at the end: 3% of the guesses were right" in off
    assert "accepted" not in off
    assert line_for(replace(report, proposed=0, accepted=0)).endswith("; no guesses (ngram)")


METRICS = Metrics(
    prompt_tokens=3,
    reused_tokens=0,
    new_tokens=10,
    ttft_s=0.1,
    total_s=1.0,
    tokens_per_second=10.0,
    token_s=0.1,
    return_s=0.0,
    client_s=0.0,
    repairs=0,
    route="a 0:6",
    hops=(),
)
