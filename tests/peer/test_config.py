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
def test_a_size_that_is_none_is_quoted(text: str) -> None:
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
def test_a_senseless_setting_is_named(field: str, value: Any) -> None:
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
def test_an_npu_gets_the_engine_that_it_can_run(engine: str, device: str, kind: str) -> None:
    config = JoinConfig(package="model", cache_dir=Path("cache"), engine=engine, device=device)
    assert config.engine_kind == kind


def test_a_disk_is_refused_where_nothing_would_go_there() -> None:
    with pytest.raises(ConfigError, match="--kv-spill is for the paged engine, and this is the stateful one"):
        JoinConfig(package="model", cache_dir=Path("cache"), engine="stateful", kv_spill=Path("spill"))


def test_what_an_npu_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither state nor dynamic shapes: use --engine static"):
        JoinConfig(package="model", cache_dir=Path("cache"), engine="stateful", device="NPU")
