"""Shared fixtures: the demo model, its package, its unsplit graph and the text that it generates; tiny models.

Artifacts that take long to build are cached in the user's cache directory under a digest of their inputs: a changed
exporter builds them again. `SWARM_DEMO_MODEL` names the GGUF file to use, `SWARM_TEST_PACKAGE` a package to use
unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from swarm.app.demo_model import fetch_demo_model
from swarm.process import telemetry
from swarm.process.child_process import module_command, module_environment
from swarm.process.folders import cache_folder

pytest_plugins = ["tests.sharing"]

ROOT = Path(__file__).parent.parent
GreedyReference = Callable[[Sequence[int], int], list[int]]
ChatIds = Callable[[str], list[int]]

_MAX_VERSIONS = 3
_MAKE_IR = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


# Tests that use one of these fixtures are marked `model`: `pytest -m "not model"` runs the fast ones.
MODEL_FIXTURES = {"smollm2_gguf", "tiny_irs", "tiny_packages", "checkpoint_artifacts"}
# (context, chunk) of the static graphs in the tests' packages.
TINY_STATIC, SMOLLM2_STATIC = (48, 8), (64, 32)


def pytest_configure() -> None:
    telemetry.switch_off()
    _hide_broken_torchvision()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells ignore SIGINT for background jobs. The tests of Ctrl-C and the peers that they start need it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MODEL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)


def _hide_broken_torchvision() -> None:
    """Hide torchvision from imports if its build differs from torch's.

    optimum-intel requires torchvision. With another build of torch (`+cpu`) its import fails, and with it that of
    transformers, which works without torchvision.
    """
    try:
        builds = {version(name).partition("+")[2] for name in ("torch", "torchvision")}
    except PackageNotFoundError:
        return
    if len(builds) > 1:
        sys.modules["torchvision"] = None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return fetch_demo_model(cache_folder())


@pytest.fixture(scope="session")
def smollm2_package(smollm2_gguf: Path, smollm2_ir: Path) -> Path:
    """The model package of `smollm2_gguf`, with 30 layers. Read only; a test copies what it damages.

    Built from `smollm2_ir`, so that the file is converted only once. tests/swarm/app/test_demo.py compares this package
    with the one that the exporter builds from the file.
    """
    if path := os.environ.get("SWARM_TEST_PACKAGE"):
        return Path(path)

    def reuse_conversion(_path: Path, _architecture: str, scratch: Path) -> None:
        shutil.copytree(smollm2_ir.parent, scratch, symlinks=True, copy_function=os.link, dirs_exist_ok=True)

    def export(work: Path) -> None:
        from export.package.from_graph import export_package

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("export.sources.gguf._convert", reuse_conversion)
            export_package(smollm2_gguf, work / "smollm2")

    return (
        _build_cached("package", [*_exporter_sources(), str(smollm2_ir).encode(), _stamp(smollm2_gguf)], export)
        / "smollm2"
    )


@pytest.fixture(scope="session")
def smollm2_ir(smollm2_gguf: Path) -> Path:
    """The unsplit graph as openvino_genai writes it: `openvino_model.xml`, with the tokenizers in its folder."""

    def convert(work: Path) -> None:
        (work / "model.gguf").symlink_to(smollm2_gguf.resolve())
        command = [sys.executable, "-c", _MAKE_IR, str(work / "model.gguf")]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    return (
        _build_cached("ir", [version("openvino-genai").encode(), _stamp(smollm2_gguf)], convert) / "openvino_model.xml"
    )


@pytest.fixture(scope="session")
def smollm2_f16_package(smollm2_ir: Path, smollm2_package: Path) -> Path:
    """The same model under the same name, with f16 weights and a context of 128 tokens: another digest."""
    from swarm.model.manifest import load_manifest

    def export(work: Path) -> None:
        import openvino as ov
        from openvino.passes import ConstantFolding, Manager

        from export.package.from_graph import export_package

        unpacked = work / "ir"
        unpacked.mkdir()
        for path in smollm2_ir.parent.glob("*tokenizer.*"):
            (unpacked / path.name).symlink_to(path)
        (unpacked / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128}))
        model = ov.Core().read_model(smollm2_ir)
        folding = Manager()
        folding.register_pass(ConstantFolding())  # The 4-bit weights become f32.
        folding.run_passes(model)
        ov.save_model(model, unpacked / smollm2_ir.name, compress_to_fp16=True)
        export_package(unpacked, work / "smollm2", name=load_manifest(smollm2_package).name)
        shutil.rmtree(unpacked)

    return _build_cached("f16-package", [*_exporter_sources(), str(smollm2_ir).encode()], export) / "smollm2"


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_ir: Path) -> Any:
    """The unsplit model's own `openvino_genai.Tokenizer`."""
    import openvino_genai

    return openvino_genai.Tokenizer(str(smollm2_ir.parent))


@pytest.fixture(scope="session")
def chat_ids(smollm2_tokenizer: Any) -> ChatIds:
    """`chat_ids(question)`: the token ids of a chat of one message, with the model's own tokenizer and template."""

    def encode(question: str) -> list[int]:
        message = {"role": "user", "content": question}
        text = smollm2_tokenizer.apply_chat_template([message], add_generation_prompt=True)
        ids: list[int] = smollm2_tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        return ids

    return encode


@pytest.fixture(scope="session")
def greedy_reference(smollm2_ir: Path) -> GreedyReference:
    """`greedy_reference(prompt_ids, n)`: the n token ids that the unsplit model generates greedily in f32.

    The end-of-text id does not end the text. No code of this project runs: this makes it a reference.
    """
    import numpy as np
    import openvino as ov

    compiled = ov.Core().compile_model(
        smollm2_ir,
        "CPU",
        {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    )
    known: dict[tuple[int, ...], list[int]] = {}

    def continue_greedily(prompt_ids: Sequence[int], n: int) -> list[int]:
        prompt = tuple(int(token) for token in prompt_ids)
        ids = known.setdefault(prompt, [])
        if len(ids) < n:
            ids[:] = []
            request = compiled.create_infer_request()
            step = np.array([prompt], np.int64)
            while len(ids) < n:
                past, end = len(prompt) + len(ids) - step.shape[1], len(prompt) + len(ids)
                logits = request.infer(
                    {
                        "input_ids": step,
                        "attention_mask": np.ones((1, end), np.int64),
                        "position_ids": np.arange(past, end, dtype=np.int64)[None],
                        "beam_idx": np.zeros(1, np.int32),
                    }
                )[0]
                ids.append(int(logits[0, -1].argmax()))
                step = np.array([[ids[-1]]], np.int64)
        return ids[:n]

    return continue_greedily


@pytest.fixture(scope="session")
def tiny_irs() -> Mapping[str, Path]:
    """Family -> directory with the IR of a tiny random model, as optimum-intel writes it."""

    def make(work: Path) -> None:
        run_module("tests.export.make_tiny", str(work))

    recipe = (ROOT / "tests" / "export" / "make_tiny.py").read_bytes()
    folder = _build_cached("tiny-irs", [recipe, version("optimum-intel").encode()], make)
    return {ir.name: ir for ir in sorted(folder.iterdir()) if ir.is_dir()}


@pytest.fixture(scope="session")
def tiny_packages(tiny_irs: Mapping[str, Path]) -> Mapping[str, Path]:
    """Family -> its package with the original weights. Read only; `mistral` has sliding windows."""

    def make(work: Path) -> None:
        from export.package.from_graph import export_package

        for family, ir in tiny_irs.items():
            export_package(ir, work / family)

    folder = _build_cached(
        "tiny-packages", [*_exporter_sources(), *(str(ir).encode() for ir in tiny_irs.values())], make
    )
    return {family: folder / family for family in tiny_irs}


@pytest.fixture(scope="session")
def tiny_static_packages(tiny_packages: Mapping[str, Path]) -> Mapping[str, Path]:
    """Family -> its package with static graphs, `TINY_STATIC`. Read only."""

    def make(work: Path) -> None:
        for family, package in tiny_packages.items():
            add_static(package, work / family, *TINY_STATIC)

    folder = _build_cached(
        "tiny-static", [*_exporter_sources(), *(str(path).encode() for path in tiny_packages.values())], make
    )
    return {family: folder / family for family in tiny_packages}


@pytest.fixture(scope="session")
def smollm2_static_package(smollm2_package: Path) -> Path:
    """The demo model's package with static graphs, `SMOLLM2_STATIC`. Read only."""

    def make(work: Path) -> None:
        add_static(smollm2_package, work / "smollm2", *SMOLLM2_STATIC)

    return _build_cached("smollm2-static", [*_exporter_sources(), str(smollm2_package).encode()], make) / "smollm2"


def add_static(package: Path, target: Path, context: int, chunk: int) -> None:
    """Copy `package` to `target` and add static graphs."""
    from dataclasses import replace

    from export.graph.static import static_spec, write_static
    from swarm.model.manifest import MANIFEST, load_manifest

    shutil.copytree(package, target)
    manifest, spec = load_manifest(target), static_spec(context, chunk)
    parts = {**manifest.parts, **write_static(target, len(manifest.layers), spec)}
    (target / MANIFEST).write_bytes(replace(manifest, parts=parts, static=spec).to_json())


@pytest.fixture(scope="session")
def checkpoint_artifacts() -> Path:
    """The output of `tests.export.export_checkpoints`: tiny random checkpoints, and their packages in f32."""

    def make(work: Path) -> None:
        run_module("tests.export.export_checkpoints", str(work))

    names = ("export_checkpoints.py", "make_checkpoints.py", "make_tiny.py")
    recipes = [(ROOT / "tests" / "export" / name).read_bytes() for name in names]
    return _build_cached("tiny-checkpoints", [*_exporter_sources(), *recipes, version("transformers").encode()], make)


@pytest.fixture(scope="session")
def tiny_checkpoints(checkpoint_artifacts: Path) -> Mapping[str, Path]:
    """Family -> a tiny random checkpoint with its `reference.json` (`tests.export.make_checkpoints`)."""
    return {path.name: path for path in sorted((checkpoint_artifacts / "checkpoints").iterdir())}


@pytest.fixture(scope="session")
def checkpoint_packages(checkpoint_artifacts: Path) -> tuple[Mapping[str, Path], Mapping[str, str]]:
    """(family -> the package of its tiny checkpoint in f32, family -> why it was refused)."""
    found = sorted((checkpoint_artifacts / "packages").iterdir())
    packages = {path.name: path for path in found if (path / "manifest.json").exists()}
    return packages, json.loads((checkpoint_artifacts / "refused.json").read_text())


def run_module(module: str, *arguments: str) -> None:
    """Run a module in a child process: its imports take long, and torch stays out of this process.

    `module_environment` switches off OpenVINO's telemetry, which would start a process for each conversion.
    """
    command = [*module_command(module), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=module_environment(), capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        pytest.fail(f"{module} failed:\n{done.stderr[-4000:]}")


def build_for_exporter(kind: str, make: Callable[[Path], None], *inputs: bytes) -> Path:
    """The directory that `make` fills, cached for this exporter and these `inputs`."""
    return _build_cached(kind, [*_exporter_sources(), *inputs], make)


def _exporter_sources() -> list[bytes]:
    return [
        path.read_bytes() for path in sorted([*ROOT.glob("export/**/*.py"), ROOT / "swarm" / "model" / "manifest.py"])
    ]


def _stamp(path: Path) -> bytes:
    return f"{path.name} {path.stat().st_size}".encode()


def _build_cached(kind: str, inputs: Iterable[bytes], make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, cached for these `inputs`."""
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    folder = cache_folder() / "tests" / kind
    target = folder / digest
    with _lock(folder / "lock"):
        if not target.exists():
            # The latest versions stay: a run of other sources may use them.
            for stale in sorted(folder.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime)[:-_MAX_VERSIONS]:
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as work:
                (Path(work) / kind).mkdir()
                make(Path(work) / kind)
                os.replace(Path(work) / kind, target)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
