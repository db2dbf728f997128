from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from peer.config import JoinConfig
from peer.loading.self_test import SelfTest
from peer.loading.self_test_cache import SelfTestRecord
from peer.loading.span_files import SpanFiles
from swarm.app.local_swarm import LocalSwarm
from swarm.errors import ConfigError
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange

PASSED = SelfTest(
    numerics="f32/f32", layer_time_s=0.001, prefill_time_s=0.0001, engine="stateful", fallback_reason="no pages"
)


@pytest.fixture
def span_files(tiny_packages: Mapping[str, Path]) -> SpanFiles:
    package = tiny_packages["llama"]
    return SpanFiles(
        package=package, manifest=load_manifest(package), span=LayerRange(1, 3), memory=1 << 30, fetched=False
    )


@pytest.fixture
def config(tmp_path: Path, span_files: SpanFiles) -> JoinConfig:
    return JoinConfig(package=str(span_files.package), cache_dir=tmp_path)


def test_a_record_is_taken_by_one_start_and_written_again_when_it_passed(
    config: JoinConfig, span_files: SpanFiles
) -> None:
    record = SelfTestRecord.of(config, span_files)
    assert record.take() is None
    record.put(PASSED)
    assert SelfTestRecord.of(config, span_files).take() == replace(PASSED, remembered=True)
    assert record.take() is None  # The start that took it has crashed.
    record.put(replace(PASSED, remembered=True))
    assert record.take() == replace(PASSED, remembered=True)


def test_another_span_or_option_has_its_own_record(config: JoinConfig, span_files: SpanFiles) -> None:
    SelfTestRecord.of(config, span_files).put(PASSED)
    others = [replace(config, precision="performance"), replace(config, threads=2), replace(config, engine="stateful")]
    assert all(SelfTestRecord.of(other, span_files).take() is None for other in others)
    assert SelfTestRecord.of(config, replace(span_files, span=LayerRange(1, 4))).take() is None
    assert SelfTestRecord.of(config, span_files).take() is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"numerics": "f32/f32"}', '{"what": 1}'])
def test_a_damaged_record_is_ignored(text: str, config: JoinConfig, span_files: SpanFiles) -> None:
    record = SelfTestRecord.of(config, span_files)
    record.put(PASSED)
    record.path.write_text(text)
    assert record.take() is None


def test_a_record_that_cannot_be_written_is_skipped(config: JoinConfig, span_files: SpanFiles) -> None:
    (config.cache_dir / "tests").write_text("a file where a directory should be")
    record = SelfTestRecord.of(config, span_files)
    record.put(PASSED)
    assert record.take() is None


def test_a_missing_device_is_named(config: JoinConfig, span_files: SpanFiles) -> None:
    with pytest.raises(ConfigError, match="'QPU'"):
        SelfTestRecord.of(replace(config, device="QPU"), span_files)


def test_a_peer_that_starts_again_runs_its_self_test_after_loading(
    tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    orders = []
    for start in range(2):
        with LocalSwarm(tmp_path / str(start), options=["--threads", "1", "--cache-dir", str(tmp_path)]) as swarm:
            member = swarm.join(tiny_packages["llama"], LayerRange(0, 4))
            swarm.wait()
            orders.append([event["phase"] for event in member.events if event["phase"] in ("tested", "loaded")])
            tested = member.event("tested")
            assert tested is not None
            assert tested["layer_time_s"] > 0
            assert tested["numerics"] == "f32/f32"
    assert orders == [["tested", "loaded"], ["loaded", "tested"]]
