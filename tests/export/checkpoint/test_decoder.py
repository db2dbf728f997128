"""One layer of a checkpoint's model: which models are refused, what a part depends on, where tensors are stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.decoder import Decoder
from export.checkpoint.torch_stack import load_transformers
from export.graph.compress import Format
from export.package.from_checkpoint import CheckpointExport
from swarm.errors import PackageError, UnsupportedModel
from tests.export.make_tiny import HIDDEN, LAYERS, common_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def decoder_of(directory: Path, config: Mapping[str, object], *tensors: str) -> Decoder:
    """A decoder of a checkpoint that declares `tensors` without having them."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return Decoder.of(Checkpoint(directory=directory, config=config, tensors=dict.fromkeys(tensors)))  # type: ignore[arg-type]


def test_the_digest_of_a_part_does_not_depend_on_the_checkpoints_path(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share an export store the checkpoint at different paths, and a path can be relative."""
    source = tiny_checkpoints["qwen3"]
    shutil.copytree(source, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    paths = [source, tmp_path / "elsewhere", Path("elsewhere")]
    assert len({CheckpointExport.open(path, Format()).made_from("layer_001", 1) for path in paths}) == 1


def test_a_layer_with_other_settings_in_the_whole_model_is_refused(tmp_path: Path) -> None:
    """A DiffLlama initializes a value of each layer by the layer's number."""
    config = load_transformers().DiffLlamaConfig(**common_config(100)).to_dict()
    with pytest.raises(UnsupportedModel, match=r"diffllama: self_attn\.lambda_init is 0\.35\d* in layer 1 but 0\.2"):
        decoder_of(tmp_path, config).require_separable()


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    with pytest.raises(UnsupportedModel, match=r"no models of the type 'own', and code from .* is not run"):
        decoder_of(tmp_path, own)
    known = {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}, **common_config(100)}
    assert decoder_of(tmp_path, known).layers == LAYERS


def test_a_config_value_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"cannot read .*config\.json .*hidden_size"):
        decoder_of(tmp_path, {"model_type": "llama", **common_config(100), "hidden_size": str(HIDDEN)})


def test_a_tied_head_is_read_under_the_name_that_is_stored(tmp_path: Path) -> None:
    tied = {"model_type": "llama", **common_config(100), "tie_word_embeddings": True}
    assert decoder_of(tmp_path, tied, EMBEDDING).checkpoint_names([EMBEDDING], head=True) == {EMBEDDING: EMBEDDING}
    assert decoder_of(tmp_path, tied, HEAD).checkpoint_names([EMBEDDING]) == {EMBEDDING: HEAD}
    both = decoder_of(tmp_path, tied, EMBEDDING, HEAD)
    assert both.checkpoint_names([EMBEDDING], head=True) == {EMBEDDING: HEAD}
    assert both.checkpoint_names([EMBEDDING]) == {EMBEDDING: EMBEDDING}


def test_a_head_that_is_not_tied_must_be_stored(tmp_path: Path) -> None:
    untied = {"model_type": "llama", **common_config(100), "tie_word_embeddings": False}
    with pytest.raises(PackageError, match=r"lacks lm_head\.weight: fetch it again"):
        decoder_of(tmp_path, untied, EMBEDDING).checkpoint_names([HEAD], head=True)
