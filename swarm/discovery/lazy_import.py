"""Lazy packages: the `__init__` of a package runs only when a name is read that it has not defined yet.

Importing `a.b.c` runs the `__init__` of `a` and of `a.b` first, with all their imports. If `a.b` is lazy, its modules
can be imported alone, and reading any other name from it runs its `__init__`.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if module := sys.modules.get(f"{self.__name__}.{name}"):
            return module  # its import is still running
        spec = self.__spec__
        if name.startswith("__") or spec is None or spec.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # From now on this is an ordinary module: a name that `__init__` does not define raises AttributeError.
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def lazy_package(name: str) -> ModuleType:
    """Make `name` a lazy package, unless it is imported already. Call it for the parent package first.

    Raises ModuleNotFoundError.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _LazyPackage
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
    return package
