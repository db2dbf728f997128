"""torch, transformers and optimum-intel, loaded when a checkpoint is exported and not before."""

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


@functools.cache  # each is read from a file, and each part of a package names them
def versions() -> Mapping[str, str]:
    """Of what a package depends on beside the checkpoint. Raises ConfigError naming what is not installed."""
    try:
        return {name: version(name) for name in (*NEEDED, "openvino")}
    except PackageNotFoundError as error:
        raise ConfigError(
            f"exporting a checkpoint needs {error.name}: install it with pip install 'aipc-swarm[export]'"
        ) from error


def load_transformers() -> ModuleType:
    """Import transformers. Raises ConfigError where it, or what it needs, cannot be imported."""
    versions()
    _hide_broken_torchvision()
    try:
        with quiet():
            import transformers
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot be imported ({error}): install 'aipc-swarm[export]' again") from error
    return cast(ModuleType, transformers)


def _hide_broken_torchvision() -> None:
    """optimum-intel brings torchvision, which works only beside the build of torch that it was made for.

    Beside another its import fails, and that of transformers with it. None marks it as not installed.
    """
    try:
        builds = {version(name).partition("+")[2] for name in ("torch", "torchvision")}
    except PackageNotFoundError:
        return
    if len(builds) > 1:
        sys.modules.setdefault("torchvision", cast(ModuleType, None))


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers and the tracer say of every layer is meant for who writes models, not for who exports one."""
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
