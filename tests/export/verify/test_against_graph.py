"""Comparisons of packages with source graphs: equal ones pass, different ones fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from export.package.from_graph import export_package
from export.verify.against_graph import require_exact, verify_package
from swarm.errors import DamagedFile, EngineError, PackageError
from swarm.process.child_process import module_environment


def test_another_models_package_differs(tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path]) -> None:
    qwen3 = tiny_irs["qwen3"] / "openvino_model.xml"
    assert verify_package(tiny_packages["llama"], qwen3) > 0.01
    with pytest.raises(PackageError, match="differ from it by up to"):
        require_exact(tiny_packages["llama"], qwen3)


def test_a_damaged_file_is_named(
    tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    package = shutil.copytree(tiny_packages["llama"], tmp_path / "package")
    with (package / "layer_002.bin").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(DamagedFile, match=r"layer_002\.bin is damaged"):
        verify_package(package, tiny_irs["llama"] / "openvino_model.xml")


def test_a_source_that_does_not_compile_is_named(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nothing\.xml cannot be compiled"):
        verify_package(tiny_packages["llama"], tmp_path / "nothing.xml")


def test_progress_ends_at_the_last_part(tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path]) -> None:
    reported: list[tuple[str, int, int]] = []
    ir = tiny_irs["mixtral"] / "openvino_model.xml"
    verify_package(tiny_packages["mixtral"], ir, decode=1, progress=lambda *step: reported.append(step))
    assert reported[-1] == ("verifying", 6, 6)


@pytest.mark.parametrize(("family", "weights"), [("llama", "int8"), ("mixtral", "int8"), ("phi3", "f16")])
def test_compressed_weights_stay_close(family: str, weights: str, tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    export_package(tiny_irs[family], tmp_path / "package", weights=weights)
    difference = verify_package(tmp_path / "package", tiny_irs[family] / "openvino_model.xml")
    assert 0.0 < difference < 0.1


def test_a_process_that_has_compared_packages_can_be_interrupted(
    tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path], tiny_static_packages: Mapping[str, Path]
) -> None:
    """Compiling and dropping graphs in the main thread would remove its alternate stack for signals."""
    package, ir = tiny_packages["llama"], tiny_irs["llama"] / "openvino_model.xml"
    static = tiny_static_packages["llama"]
    code = f"""
import pathlib, signal
from export.verify.static_check import check_static_layers
from export.verify.against_graph import verify_package
from swarm.model.manifest import load_manifest

static = pathlib.Path({str(static)!r})
compare = {{
    "with the source": lambda: verify_package(pathlib.Path({str(package)!r}), pathlib.Path({str(ir)!r})),
    "with static graphs": lambda: check_static_layers(static, load_manifest(static)),
}}
signal.signal(signal.SIGINT, signal.default_int_handler)
for what, run in compare.items():
    run()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print(what, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=module_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "with the source\nwith static graphs\n"), done.stderr
