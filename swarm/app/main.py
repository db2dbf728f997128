"""The command `swarm`: names and one-line helps are here, the commands themselves beside what they run.

A command's module is imported when that command is chosen, so that `swarm --help` answers at once and
`swarm generate` never loads a DHT. Every error of `swarm.errors` becomes one line on stderr and its exit
code; anything else is a bug of this program, whose traceback goes to a file.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from swarm import __version__
from swarm.errors import PackageError, SwarmError, first_error
from swarm.process import telemetry
from swarm.process.folders import state_folder

INTERRUPTED = 130
BUG = 70
_NO_BUG = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""What is wrong with a disk, or with the file that stdout goes to."""

COMMANDS = {
    "demo": ("swarm.app.demo:demo", "The main job on this one machine: three peers, one answer, where its time went."),
    "export": ("export.cli:export", "Write a model package from a checkpoint, a GGUF file or an OpenVINO IR."),
    "inspect": ("export.inspect_cli:inspect", "Show what a model package holds, and how much of it fits where."),
    "join": ("peer.cli:join", "Serve layers of a model: begin a swarm, or join one."),
    "bootstrap": ("peer.cli:bootstrap", "Keep a swarm's directory alive without serving layers."),
    "models": ("client.inspector.cli:models", "List what a swarm serves."),
    "routes": ("client.inspector.cli:routes", "Show who serves which layers, and the route that a client would take."),
    "generate": ("client.cli:generate", "Generate text from a prompt."),
    "chat": ("client.cli:chat", "Talk in turns; the peers keep the KV cache between them."),
    "serve": ("swarm.app.serve:serve", "An OpenAI-compatible gateway to a swarm, with a page to see and talk to it."),
    "doctor": ("swarm.app.doctor_cli:doctor", "Check this machine: devices, memory, clock, reachability, daemon."),
}


class LazyCommand(TyperCommand):
    """Stands for a command in the list; turns into it when its arguments are to be read."""

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent, **extra)

    def _load(self) -> Any:
        module, _, function = self._target.partition(":")
        app = typer.Typer(add_completion=False)
        app.command(self.name)(getattr(importlib.import_module(module), function))
        command: Any = typer.main.get_command(app)
        for parameter in command.params:
            parameter.envvar = parameter.envvar or _variable(str(self.name), parameter)
        return command


def _variable(command: str, parameter: Any) -> str:
    """The environment variable that stands for an option: SWARM_SERVE_API_KEY_FILE for `serve --api-key-file`.

    Services are set up so. What may be given several times is separated by spaces there.
    """
    name = max(parameter.opts, key=len).lstrip("-")
    return f"SWARM_{command}_{name}".replace("-", "_").upper()


class SwarmGroup(TyperGroup):
    """Turns what a command raises into a line on stderr and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (target, summary) in COMMANDS.items():
            self.add_command(LazyCommand(name, target, summary))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except SwarmError as error:
            self._give_up(ctx, error, error)
        except ExceptionGroup as group:
            # Tasks that failed together: nearly always one failed and the others were cancelled.
            first = first_error(group)
            if not isinstance(first, SwarmError):
                self._bug(ctx, group)
            self._give_up(ctx, group, first)
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("click", "typer") or isinstance(error, BrokenPipeError):
                raise  # an exit, or a wrong option: typer shows those
            self._bug(ctx, error)

    def _give_up(self, ctx: Any, raised: BaseException, error: SwarmError) -> NoReturn:
        _end_if_interrupted(error)
        if ctx.params.get("debug"):
            traceback.print_exception(raised)
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from raised

    def _bug(self, ctx: Any, error: BaseException) -> NoReturn:
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        _end_if_interrupted(first)
        if isinstance(first, OSError) and first.errno in _NO_BUG:
            self._give_up(ctx, error, PackageError(f"nothing can be written: {first}; make room, or write elsewhere"))
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if ctx.params.get("debug"):
            traceback.print_exception(error)
            typer.echo(f"error: {said}", err=True)
        else:
            typer.echo(f"error: a bug of this program: {said}; {_keep_traceback(error)}", err=True)
        raise typer.Exit(BUG) from error


def _end_if_interrupted(error: BaseException) -> None:
    """A Ctrl-C while a compiled module is imported arrives as its ImportError, or as what we made of that."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # an error that is raised again may be its own
        causes.append(cause)
        cause = cause.__cause__
    if any(isinstance(one, KeyboardInterrupt) for one in causes):
        raise typer.Exit(INTERRUPTED) from error


def _keep_traceback(error: BaseException) -> str:
    """Write it to a file of its own. Says where it is, or why it is nowhere."""
    path: Path = state_folder() / f"error-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"its traceback could not be kept in {path} ({problem.strerror}): run again with --debug"
    return f"its traceback is in {path}"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm {__version__}")
        raise typer.Exit


app = typer.Typer(cls=SwarmGroup, no_args_is_help=True)


@app.callback()
def _swarm(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SWARM_DEBUG", help="Show tracebacks; say more in logs.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A large language model served by a handful of AI PCs, a few layers each."""


def _open_standard_streams() -> None:
    """Where the caller has closed one (`<&-`), the first sockets would take its place: libuv ends the process then."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code: `sys.argv` where no `arguments` are given."""
    telemetry.switch_off()
    _open_standard_streams()
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="swarm")
    finally:
        # What was to be done is done: a Ctrl-C while the interpreter goes down does not change how it ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(0)
