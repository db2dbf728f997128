from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peer.config import JoinConfig, parse_bytes
from swarm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6_000_000_000), ("512MiB", 512 << 20), ("1.5g", 1_500_000_000), ("100", 100), ("2 kB", 2000)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "six GB", "-1GB", "6GB!", "1e9"])
def test_a_malformed_size_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write it like 6GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("package", ""),
        ("precision", "fast"),
        ("engine", "steam"),
        ("max_memory", 0),
        ("kv_tokens", 0),
        ("threads", -1),
        ("wait_s", -1.0),
        ("grace_s", -0.1),
        ("name", "a\nb"),
        ("name", "x" * 65),
    ],
)
def test_an_invalid_option_is_named(field: str, value: Any) -> None:
    settings: dict[str, Any] = {"package": "model", "cache_dir": Path("cache"), field: value}
    with pytest.raises(ConfigError, match=field.removesuffix("_s")):
        JoinConfig(**settings)


@pytest.mark.parametrize(
    ("engine", "device", "kind"),
    [
        ("auto", "CPU", "paged"),
        ("auto", "GPU.0", "stateful"),
        ("auto", "NPU", "static"),
        ("static", "CPU", "static"),
        ("static", "NPU.1", "static"),
    ],
)
def test_the_engine_follows_from_the_option_and_the_device(engine: str, device: str, kind: str) -> None:
    config = JoinConfig(package="model", cache_dir=Path("cache"), engine=engine, device=device)
    assert config.engine_kind == kind


def test_kv_spill_is_refused_without_the_paged_engine() -> None:
    with pytest.raises(
        ConfigError,
        match="--kv-spill needs the paged engine, and this peer runs the stateful one: leave out --kv-spill",
    ):
        JoinConfig(package="model", cache_dir=Path("cache"), engine="stateful", kv_spill=Path("spill"))


def test_an_engine_that_an_npu_cannot_run_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="an NPU runs only graphs without state or dynamic shapes: use --engine static"
    ):
        JoinConfig(package="model", cache_dir=Path("cache"), engine="stateful", device="NPU")
