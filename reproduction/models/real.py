"""SmolLM2-135M-Instruct for experiments, unsplit and as a package, in the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from export.package.from_graph import export_package
from reproduction.experiment import Log
from swarm.app.demo_model import SHA256, fetch_demo_model
from swarm.model.manifest import MANIFEST, Manifest, load_manifest
from swarm.process.folders import cache_folder

_CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as an unsplit graph (`ir`) and as a package."""

    ir: Path
    package: Path
    manifest: Manifest


def smollm2(log: Log) -> Model:
    """SmolLM2-135M-Instruct with the 4-bit weights of the GGUF file; cached."""
    folder = cache_folder() / "reproduction" / SHA256[:12]
    ir, package = folder / "ir", folder / "package"
    gguf = fetch_demo_model(cache_folder())
    if not (ir / "openvino_model.xml").exists():
        log("converting the demo model (once)")
        ir.mkdir(parents=True, exist_ok=True)
        link = ir / "model.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(gguf.resolve())
        # The pipeline writes its IR into the folder of the file. A child process: its end frees the memory.
        subprocess.run([sys.executable, "-P", "-c", _CONVERT, str(link)], check=True, capture_output=True)
    if not (package / MANIFEST).exists():
        log("exporting the model package (once)")
        export_package(gguf, package)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def smollm2_f16(log: Log) -> Model:
    """The same model with f16 weights: the target for which the 4-bit one drafts."""
    small = smollm2(log)
    folder = small.package.parent / "f16"
    ir, package = folder / "ir", folder / "package"
    if not (package / MANIFEST).exists():
        log("exporting the demo model in f16 (once)")
        _unpack(small, ir)
        export_package(ir, package, name="smollm2-135m-instruct-f16", force=True)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def _unpack(small: Model, target: Path) -> None:
    """Write the graph with f16 weights instead of 4-bit ones."""
    import openvino as ov
    from openvino.passes import ConstantFolding, Manager

    target.mkdir(parents=True, exist_ok=True)
    for path in small.ir.glob("*tokenizer.*"):
        (target / path.name).write_bytes(path.read_bytes())
    config = {"model_type": "llama", "max_position_embeddings": small.manifest.context_length}
    (target / "config.json").write_text(json.dumps(config))
    model = ov.Core().read_model(small.ir / "openvino_model.xml")
    folding = Manager()
    folding.register_pass(ConstantFolding())
    folding.run_passes(model)
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=True)
