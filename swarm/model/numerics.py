"""How a span computes: the precision that is asked for, and the one that a device then has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["accuracy", "performance"]
"""`accuracy`: f32 with an f32 cache, the unsplit model's tokens; `performance`: what the device does by default."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How a span computes: both must agree along a route for its text to be one model's text.

    `inference` is `f32`, `bf16` or `f16`; `kv` the stored precision of the cache (`f32`, `u8` ...).
    """

    inference: str
    kv: str

    def __str__(self) -> str:
        return f"{self.inference}/{self.kv}"

    @classmethod
    def parse(cls, text: str) -> Numerics:
        inference, _, kv = text.partition("/")
        return cls(inference=inference, kv=kv or inference)
