"""The commands `swarm generate` and `swarm chat`. The answer streams to stdout, everything else goes to stderr."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Annotated, TextIO

import typer

from client.client import SwarmClient
from client.config import AUTO, MAX_GUESSES, ClientConfig, GenerationConfig
from client.generation.chat import ChatSession
from client.generation.generate import Piece, Reply, collect
from client.options import (
    DraftOption,
    InitialPeers,
    JsonFlag,
    ModelArgument,
    NumericsOption,
    PrefixKey,
    parse_initial_peers,
    parse_numerics,
    write_json,
)
from client.progress import Progress, describe
from swarm.errors import ConfigError, ContextExceeded, SwarmError
from swarm.process import event_loop

MaxNewTokens = Annotated[int, typer.Option(help="The maximum number of tokens in an answer.")]
Temperature = Annotated[
    float | None, typer.Option(help="Over 0: draw tokens at random; 0 or left out: take the likeliest.")
]
TopK = Annotated[int | None, typer.Option(help="Draw among this many of the likeliest tokens; 0: among all.")]
TopP = Annotated[float | None, typer.Option(help="Draw among the likeliest tokens that together have this share.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens below this share of the likeliest one's.")]
Penalty = Annotated[float, typer.Option(help="Over 1: tokens that are in the text already become less likely.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeat it to name several.")]
DraftTokens = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_GUESSES, help="Guess this many tokens a trip; left out, measurements decide."),
]
System = Annotated[str | None, typer.Option(help="The system prompt: instructions before the conversation.")]


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    initial_peers: InitialPeers,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    draft: DraftOption = AUTO,
    draft_tokens: DraftTokens = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    numerics: NumericsOption = "",
    prefix_key: PrefixKey = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer one prompt.

    Exit code 3 where layers are not covered, 8 where the prompt is too long, 130 after Ctrl-C.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_strings=tuple(stop or ()),
        draft=draft,
        num_assistant_tokens=draft_tokens,
    )
    if raw and system is not None:
        raise ConfigError("--system belongs to a chat template, and --raw uses none: leave one of them out")
    text = _stdin().read() if prompt == "-" else prompt
    question: str | list[dict[str, str]] = text
    if system is not None:
        question = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    with Progress() as progress:
        reply = event_loop.run(
            _generate(model, initial_peers, numerics, prefix_key, question, config, progress, raw, as_json)
        )
        if as_json:
            write_json(reply.to_plain(), indent=None)
        progress.note(describe(reply), dim=True)


async def _generate(
    model: str,
    initial_peers: list[str],
    numerics: str,
    prefix_key: str | None,
    question: str | list[dict[str, str]],
    config: GenerationConfig,
    progress: Progress,
    raw: bool,
    as_json: bool,
) -> Reply:
    async with (
        await _connect(model, initial_peers, numerics, prefix_key, progress) as client,
        aclosing(client.generate(question, config, raw=raw)) as pieces,
    ):
        return await collect(pieces if as_json else _echo(pieces, progress))


def chat(
    model: ModelArgument,
    initial_peers: InitialPeers,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    draft: DraftOption = AUTO,
    draft_tokens: DraftTokens = None,
    system: System = None,
    context: Annotated[
        int, typer.Option(min=2, help="Tokens of conversation for which the peers reserve KV cache.")
    ] = ClientConfig.chat_tokens,
    numerics: NumericsOption = "",
    prefix_key: PrefixKey = None,
) -> None:
    """Talk in turns; the peers keep the KV cache between them.

    Lines that begin with a slash are commands: /reset forgets the conversation, /route shows the peers,
    /quit ends it. Ctrl-C stops an answer, twice in a row it quits.
    """
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop_strings=tuple(stop or ()),
        draft=draft,
        num_assistant_tokens=draft_tokens,
    )
    # Between turns the event loop does not run: input() then has the terminal, its editing and Ctrl-C to itself.
    with Progress() as progress, event_loop.runner() as runner:
        client = runner.run(_connect(model, initial_peers, numerics, prefix_key, progress, chat_tokens=context))
        try:
            runner.run(client.load_draft(draft))  # a wrong draft must fail before the first question
            session = client.session(config, system=system)
            _Conversation(session, runner, progress).run()
        finally:
            runner.run(client.close())


class _Conversation:
    """The loop of `swarm chat`: questions from stdin, answers to stdout."""

    def __init__(self, session: ChatSession, runner: asyncio.Runner, progress: Progress) -> None:
        self._session = session
        self._runner = runner
        self._progress = progress
        self._interactive = _stdin().isatty()
        self._interrupted = False

    def run(self) -> None:
        """Run until /quit or the end of the input. Raises KeyboardInterrupt after Ctrl-C twice in a row."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # importing it gives input() editing and a history
            self._progress.note("/reset forgets the conversation, /route shows the peers, /quit ends it")
        while True:
            try:
                line = self._read_line()
                if line is None or line == "/quit":
                    return
                self._interrupted = False
                self._handle(line)
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                self._progress.note("press Ctrl-C again to quit")

    def _read_line(self) -> str | None:
        if self._interactive:
            self._progress.ask("> ")
        try:
            return input().strip()
        except EOFError:
            return None

    def _handle(self, line: str) -> None:
        if line == "/reset":
            self._session.reset()
            self._progress.note("the conversation is reset")
        elif line == "/route":
            self._progress.note(self._session.route or "no route yet: it is chosen with the first question")
        elif line.startswith("/"):
            self._progress.note(f"{line.split()[0]} is not a command; the commands are /reset, /route and /quit")
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        try:
            self._progress.note(describe(self._runner.run(self._turn(text))), dim=True)
        except SwarmError as error:
            if not self._interactive:
                raise
            # The session dropped this question: the conversation can go on.
            self._progress.note(f"error: {error}")
            if isinstance(error, ContextExceeded):
                self._progress.note("/reset starts a new conversation")

    async def _turn(self, text: str) -> Reply:
        async with aclosing(self._session.stream(text)) as pieces:
            return await collect(_echo(pieces, self._progress))


async def _connect(
    model: str,
    initial_peers: list[str],
    numerics: str,
    prefix_key: str | None,
    progress: Progress,
    *,
    chat_tokens: int = ClientConfig.chat_tokens,
) -> SwarmClient:
    config = ClientConfig(numerics=parse_numerics(numerics), chat_tokens=chat_tokens)
    if prefix_key is not None:
        config = dataclasses.replace(config, prefix_key=prefix_key)
    addresses = parse_initial_peers(initial_peers)
    return await SwarmClient.connect(model, initial_peers=addresses, config=config, on_event=progress.on_event)


def _stdin() -> TextIO:
    """stdin that accepts any bytes: the check of the prompt names those that are not text, and a chat goes on."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


async def _echo(pieces: AsyncIterator[Piece], progress: Progress) -> AsyncIterator[Piece]:
    """Yields the pieces and writes their text to stdout."""
    try:
        async for piece in pieces:
            progress.write(piece.text)
            yield piece
    finally:
        progress.end_line()
