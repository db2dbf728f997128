"""The page docs/reference/commands.md, made from the commands themselves.

`python -m tests.command_reference` writes it; tests/test_command_reference.py says when it is out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click import Argument, Command, Context, Option, Parameter

from swarm.app.main import COMMANDS, LazyCommand

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "commands.md"
HEAD = """# Commands

Every option can be an environment variable too. For an option that may be given several times, spaces separate its
values there.

`swarm --debug COMMAND` (`SWARM_DEBUG=1`) shows tracebacks; `swarm --version` shows the version.
Exit codes: [troubleshooting](../how-to/troubleshooting.md).

This page is made by `python -m tests.command_reference`.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_section(load(name)) for name in COMMANDS)


def load(name: str) -> Command:
    """The command itself, with the names of its environment variables."""
    target, summary = COMMANDS[name]
    command: Command = LazyCommand(name, target, summary)._load()
    return command


def _section(command: Command) -> str:
    context = Context(command, info_name=f"swarm {command.name}")
    usage = " ".join(command.collect_usage_pieces(context))
    arguments = [p for p in command.params if isinstance(p, Argument)]
    options = [p for p in command.params if isinstance(p, Option) and p.name != "help"]
    text = f"\n## swarm {command.name}\n\n`swarm {command.name} {usage}`\n\n{_paragraphs(command.help)}\n"
    if arguments:
        text += "\n| argument | meaning |\n|---|---|\n"
        text += "".join(f"| `{p.make_metavar(context)}` | {_cell(_help_of(p))} |\n" for p in arguments)
    text += "\n| option | meaning | default | variable |\n|---|---|---|---|\n"
    return text + "".join(_row(p, context) for p in options)


def _row(option: Option, context: Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" `{_cell(option.make_metavar(context))}`"
    default = "" if option.default in (None, (), [], "") or option.is_flag else f"`{_plain(option.default)}`"
    if option.is_flag and option.default:
        default = f"`{option.opts[0]}`"
    return f"| {names}{value} | {_cell(_help_of(option))} | {default} | `{option.envvar}` |\n"


def _help_of(parameter: Parameter) -> str:
    return str(getattr(parameter, "help", None) or "")


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


if __name__ == "__main__":
    PAGE.write_text(reference())
