"""The models that experiments run on: SmolLM2-135M-Instruct, unsplit and as a package, in the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from export.package.from_graph import export_package
from reproduction.experiment import Say
from swarm.app.demo_model import SHA256, fetch_demo_model
from swarm.model.manifest import MANIFEST, Manifest, load_manifest
from swarm.process.folders import cache_folder

_CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model in both forms."""

    ir: Path
    package: Path
    manifest: Manifest


def smollm2(say: Say) -> Model:
    """SmolLM2-135M-Instruct with the GGUF file's own 4-bit weights; made once, then found in the cache."""
    folder = cache_folder() / "reproduction" / SHA256[:12]
    ir, package = folder / "ir", folder / "package"
    gguf = fetch_demo_model(cache_folder())
    if not (ir / "openvino_model.xml").exists():
        say("converting the demo model (once)")
        ir.mkdir(parents=True, exist_ok=True)
        link = ir / "model.gguf"
        link.unlink(missing_ok=True)
        link.symlink_to(gguf.resolve())
        # the pipeline writes its IR beside the file that it was given; in a child, its memory goes with it
        subprocess.run([sys.executable, "-P", "-c", _CONVERT, str(link)], check=True, capture_output=True)
    if not (package / MANIFEST).exists():
        say("exporting the model package (once)")
        export_package(gguf, package)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def smollm2_f16(say: Say) -> Model:
    """The same model with f16 weights, the target of experiments in which the 4-bit one drafts."""
    small = smollm2(say)
    folder = small.package.parent / "f16"
    ir, package = folder / "ir", folder / "package"
    if not (package / MANIFEST).exists():
        say("exporting the demo model in f16 (once)")
        _unpack(small, ir)
        export_package(ir, package, name="smollm2-135m-instruct-f16", force=True)
    return Model(ir=ir, package=package, manifest=load_manifest(package))


def _unpack(small: Model, target: Path) -> None:
    """Turn 4-bit weights into f16 ones."""
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
