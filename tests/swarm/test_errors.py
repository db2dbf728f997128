from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from swarm import errors
from swarm.errors import NotCovered, PeerBusy, PeerError, SwarmError, first_error


def tree(kind: type[SwarmError]) -> Iterator[type[SwarmError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def documented_tree() -> list[tuple[str, str | None, str]]:
    """(name, parent's name, notes) of each line of the tree in the module's docstring."""
    assert errors.__doc__ is not None
    branches: list[str] = []
    found: list[tuple[str, str | None, str]] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ((?:│   |    |├── |└── )*)([A-Z]\w+)(.*)", line)
        if match:
            depth = len(match[1]) // 4
            found.append((match[2], branches[depth - 1] if depth else None, match[3].strip()))
            branches[depth:] = [match[2]]
    return found


ALL = list(tree(SwarmError))


def test_the_documented_tree_is_the_class_tree() -> None:
    real = {(kind.__name__, None if kind is SwarmError else kind.__bases__[0].__name__) for kind in ALL}
    assert {(name, parent) for name, parent, _ in documented_tree()} == real
    assert len(documented_tree()) == len(ALL)


@pytest.mark.parametrize(("name", "notes"), [(name, notes) for name, _, notes in documented_tree()])
def test_the_documented_exit_codes_are_those_of_the_classes(name: str, notes: str) -> None:
    number = re.match(r"\d+", notes)
    if number:
        assert getattr(errors, name).exit_code == int(number[0])


@pytest.mark.parametrize(("name", "notes"), [(name, notes) for name, _, notes in documented_tree()])
def test_documented_retries_agree_with_retryable(name: str, notes: str) -> None:
    if re.search(r"\byes: ", notes):
        assert getattr(errors, name).retryable
    if re.search(r"\bno: ", notes):
        assert not getattr(errors, name).retryable


def test_every_error_has_its_own_code() -> None:
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z_]+", code) for code in codes)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.code)
def test_every_error_is_made_from_a_sentence(kind: type[SwarmError]) -> None:
    assert str(kind("what happened; what to do")) == "what happened; what to do"


def test_errors_carry_their_values_for_programs() -> None:
    assert NotCovered("", [(0, 3), (5, 7)]).missing == ((0, 3), (5, 7))
    busy = PeerBusy("", peer="p", retry_after=2.0)
    assert (busy.peer, busy.retry_after) == ("p", 2.0)
    assert (PeerError("").peer, PeerError("").retry_after) == ("", 0.0)


def test_of_errors_in_a_group_a_bug_is_shown_first() -> None:
    ours, bug = NotCovered("no layers"), ZeroDivisionError("a bug")
    assert first_error(ExceptionGroup("tasks", [ours, PeerError("gone")])) is ours
    assert first_error(ExceptionGroup("tasks", [ours, ExceptionGroup("inner", [bug])])) is bug
