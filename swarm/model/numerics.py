"""The requested precision mode, and the numerics in which a device then computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["accuracy", "performance"]
"""`accuracy`: f32 with an f32 cache, the tokens of the unsplit model; `performance`: the device's default types."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The precision of inference (`f32`, `bf16` or `f16`) and of the KV cache (`f32`, `u8` ...).

    Both must be the same on all hops of a route, unless it may mix them.
    """

    inference: str
    kv: str

    def __str__(self) -> str:
        return f"{self.inference}/{self.kv}"

    @classmethod
    def parse(cls, text: str) -> Numerics:
        inference, _, kv = text.partition("/")
        return cls(inference=inference, kv=kv or inference)
