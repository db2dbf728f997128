"""`lazy_package` on a package on disk, and on hivemind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.discovery.lazy_import import lazy_package
from tests.test_layout import loaded_by

NAME = "lazy_toy"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose `__init__` imports a name from `inner.leaf`, which imports `inner.twig`."""
    inner = tmp_path / NAME / "inner"
    inner.mkdir(parents=True)
    (tmp_path / NAME / "__init__.py").write_text(f"from {NAME}.inner.leaf import LEAF\nWHOLE = True\n")
    (inner / "__init__.py").write_text("")
    (inner / "leaf.py").write_text(f"import {NAME}.inner.twig as twig\nLEAF = twig.TWIG\n")
    (inner / "twig.py").write_text("TWIG = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_importing_a_module_does_not_run_its_lazy_package(toy: str) -> None:
    package = lazy_package(toy)
    assert importlib.import_module(f"{toy}.inner.leaf").LEAF == 3
    assert "WHOLE" not in vars(package)


def test_reading_an_undefined_name_runs_the_package(toy: str) -> None:
    package = lazy_package(toy)
    leaf = importlib.import_module(f"{toy}.inner.leaf")
    assert package.WHOLE is True
    assert package.inner.leaf is leaf
    assert importlib.import_module(toy) is package


def test_a_name_that_the_package_does_not_define_raises_attribute_error(toy: str) -> None:
    package = lazy_package(toy)
    for _ in range(2):
        with pytest.raises(AttributeError, match="nonsense"):
            _ = package.nonsense


def test_a_lazy_package_is_an_attribute_of_its_lazy_parent(toy: str) -> None:
    package = lazy_package(toy)
    inner = lazy_package(f"{toy}.inner")
    assert package.inner is inner
    assert vars(package).keys() == vars(lazy_package(toy)).keys()


def test_an_imported_package_stays_as_it_is(toy: str) -> None:
    whole = importlib.import_module(toy)
    assert lazy_package(toy) is whole
    assert whole.WHOLE is True


def test_a_missing_package_is_named_in_the_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        lazy_package("no_such_package")


def test_importing_the_dht_does_not_import_the_training_code_of_hivemind() -> None:
    statement = "import swarm.discovery.dht; swarm.discovery.dht.import_hivemind()"
    assert loaded_by(statement, "torch", "scipy", "pydantic", "hivemind.averaging") == set()
    assert loaded_by(statement, "hivemind.dht.node") == {"hivemind.dht.node"}
