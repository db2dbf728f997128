"""The command `swarm`: the list of its subcommands with one-line help, and their error handling.

The module of a command is imported when the command is chosen: `swarm --help` answers at once, and `swarm generate`
never loads the DHT. An error of `swarm.errors` becomes one line on stderr and its exit code. Any other exception is a
bug of this program: its traceback is written to a file.
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
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk, or of the file that stdout is redirected to."""

COMMANDS = {
    "demo": ("swarm.app.demo:demo", "Start three peers on this machine, show one answer and the time it took."),
    "export": ("export.cli:export", "Write a model package from a checkpoint, a GGUF file or an OpenVINO IR."),
    "inspect": ("export.inspect_cli:inspect", "Show the contents of a model package, and how many layers fit."),
    "join": ("peer.cli:join", "Serve layers of a model: start a swarm, or join one."),
    "bootstrap": ("peer.cli:bootstrap", "Keep a swarm's directory alive without serving layers."),
    "models": ("client.inspector.cli:models", "List the models that a swarm serves."),
    "routes": ("client.inspector.cli:routes", "Show which peer serves which layers, and the route of a client."),
    "generate": ("client.cli:generate", "Generate text from a prompt."),
    "chat": ("client.cli:chat", "Chat with a model; the peers keep the KV cache between messages."),
    "serve": (
        "swarm.app.serve:serve",
        "Serve OpenAI's API over a swarm, and a web page for chat and its state.",
    ),
    "doctor": ("swarm.app.doctor_cli:doctor", "Check this machine: devices, memory, clock, reachability, daemon."),
}


class LazyCommand(TyperCommand):
    """A command in the list whose module is loaded when its arguments are parsed."""

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
            parameter.envvar = parameter.envvar or _environment_variable(str(self.name), parameter)
        return command


def _environment_variable(command: str, parameter: Any) -> str:
    """The environment variable of an option: SWARM_SERVE_API_KEY_FILE for `serve --api-key-file`.

    Useful for services. Several values of a repeatable option are separated by spaces.
    """
    name = max(parameter.opts, key=len).lstrip("-")
    return f"SWARM_{command}_{name}".replace("-", "_").upper()


class SwarmGroup(TyperGroup):
    """Converts the exceptions of commands to a line on stderr and an exit code."""

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
            self._exit_with_error(ctx, error, error)
        except ExceptionGroup as group:
            # Mostly one task of a group failed and the others were cancelled.
            first = first_error(group)
            if not isinstance(first, SwarmError):
                self._exit_with_bug(ctx, group)
            self._exit_with_error(ctx, group, first)
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("click", "typer") or isinstance(error, BrokenPipeError):
                raise  # An exit or a wrong option: typer handles it.
            self._exit_with_bug(ctx, error)

    def _exit_with_error(self, ctx: Any, raised: BaseException, error: SwarmError) -> NoReturn:
        _exit_if_interrupted(error)
        if ctx.params.get("debug"):
            traceback.print_exception(raised)
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from raised

    def _exit_with_bug(self, ctx: Any, error: BaseException) -> NoReturn:
        first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        _exit_if_interrupted(first)
        if isinstance(first, OSError) and first.errno in _DISK_ERRNOS:
            self._exit_with_error(
                ctx, error, PackageError(f"nothing can be written: {first}; make room, or write elsewhere")
            )
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        if ctx.params.get("debug"):
            traceback.print_exception(error)
            typer.echo(f"error: {summary}", err=True)
        else:
            typer.echo(f"error: a bug of this program: {summary}; {_save_traceback(error)}", err=True)
        raise typer.Exit(BUG) from error


def _exit_if_interrupted(error: BaseException) -> None:
    """Exit if Ctrl-C is a cause of `error`: the import of a compiled module turns it into an ImportError."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # An error can be its own cause.
        causes.append(cause)
        cause = cause.__cause__
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        raise typer.Exit(INTERRUPTED) from error


def _save_traceback(error: BaseException) -> str:
    """Write the traceback to a new file. Returns a phrase with its path, or with the reason why it was not written."""
    path: Path = state_folder() / f"error-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"its traceback could not be written to {path} ({problem.strerror}): run again with --debug"
    return f"its traceback is in {path}"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm {__version__}")
        raise typer.Exit


app = typer.Typer(cls=SwarmGroup, no_args_is_help=True)


@app.callback()
def _swarm(
    debug: Annotated[bool, typer.Option("--debug", envvar="SWARM_DEBUG", help="Show tracebacks; log more.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A large language model served by a handful of AI PCs, a few layers each."""


def _open_standard_streams() -> None:
    """Reopen closed standard streams (`<&-`): a socket with one of their numbers makes libuv abort the process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest free number: `number`.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command in `arguments` (default: `sys.argv`) and exit with its code."""
    telemetry.switch_off()
    _open_standard_streams()
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="swarm")
    finally:
        # The command has ended: Ctrl-C while the interpreter shuts down must not change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(0)
