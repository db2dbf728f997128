"""The page of all commands, and what their help pages show."""

from __future__ import annotations

import pytest
from click import Option

from swarm.app.main import COMMANDS
from tests.command_reference import PAGE, load, reference


def test_the_page_of_commands_is_what_the_code_says() -> None:
    """If not: `python -m tests.command_reference`."""
    assert PAGE.read_text() == reference()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_has_a_help_text_and_a_variable(name: str) -> None:
    for parameter in load(name).params:
        if isinstance(parameter, Option) and parameter.name != "help":
            assert parameter.help, parameter.opts
            assert parameter.envvar, parameter.opts
