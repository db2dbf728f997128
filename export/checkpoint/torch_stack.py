"""Loads torch, transformers and optimum-intel, only when a checkpoint is exported."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import cast

from swarm.errors import ConfigError

NEEDED = ("torch", "transformers", "optimum-intel", "safetensors", "nncf")


@functools.cache  # Versions are read from files, and needed for each part of a package.
def versions() -> Mapping[str, str]:
    """The versions of the libraries that affect a package. Raises ConfigError naming one that is not installed."""
    try:
        return {name: version(name) for name in (*NEEDED, "openvino")}
    except PackageNotFoundError as error:
        raise ConfigError(
            f"exporting a checkpoint needs {error.name}: install it with pip install 'aipc-swarm[export]'"
        ) from error


def load_transformers() -> ModuleType:
    """Import transformers. Raises ConfigError if it, or a library that it needs, cannot be imported."""
    versions()
    _hide_broken_torchvision()
    try:
        with quiet():
            import transformers
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot be imported ({error}): install 'aipc-swarm[export]' again") from error
    return cast(ModuleType, transformers)


def _hide_broken_torchvision() -> None:
    """Mark torchvision, which optimum-intel installs, as not installed if its build does not match torch's.

    Its import, and with it that of transformers, would fail. None in `sys.modules` marks it as not installed.
    """
    try:
        builds = {version(name).partition("+")[2] for name in ("torch", "torchvision")}
    except PackageNotFoundError:
        return
    if len(builds) > 1:
        sys.modules.setdefault("torchvision", cast(ModuleType, None))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages of transformers and the tracer, which are meant for authors of models."""
    loggers = [logging.getLogger(name) for name in ("transformers", "optimum", "nncf", "openvino")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), _no_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _no_bars() -> Iterator[None]:
    from importlib import import_module

    if "transformers" not in sys.modules:
        yield
        return
    bars = import_module("transformers.utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
