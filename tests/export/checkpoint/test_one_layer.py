"""One layer taken out of a checkpoint's model: what may be, what stays the same, where the tensors lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.one_layer import Decoder
from export.checkpoint.torch_stack import load_transformers
from export.graph.compress import Format
from export.package.from_checkpoint import Work
from swarm.errors import PackageError, UnsupportedModel
from tests.export.make_tiny import HIDDEN, LAYERS, common_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def decoder_of(directory: Path, config: Mapping[str, object], *tensors: str) -> Decoder:
    """Of a checkpoint whose files have no tensors but are said to have these."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return Decoder.of(Checkpoint(directory=directory, config=config, tensors=dict.fromkeys(tensors)))  # type: ignore[arg-type]


def test_where_a_checkpoint_lies_is_no_part_of_what_is_made_of_it(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share the work have it in different places; one may say where by another path the next time."""
    source = tiny_checkpoints["qwen3"]
    shutil.copytree(source, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    places = [source, tmp_path / "elsewhere", Path("elsewhere")]
    assert len({Work.on(place, Format()).made_from("layer_001", 1) for place in places}) == 1


def test_a_layer_that_is_told_another_thing_at_its_place_is_refused(tmp_path: Path) -> None:
    """The layers of a DiffLlama start from a number that grows with the layer's."""
    config = load_transformers().DiffLlamaConfig(**common_config(100)).to_dict()
    with pytest.raises(
        UnsupportedModel, match=r"diffllama: self_attn\.lambda_init is 0\.35\d* in layer 1 and would be"
    ):
        decoder_of(tmp_path, config).require_separable()


def test_code_that_comes_with_a_checkpoint_is_neither_run_nor_asked_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('was run')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    with pytest.raises(UnsupportedModel, match=r"no models of the type 'own', and code from .* is not run"):
        decoder_of(tmp_path, own)
    known = {"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}, **common_config(100)}
    assert decoder_of(tmp_path, known).layers == LAYERS


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"cannot read .*config\.json .*hidden_size"):
        decoder_of(tmp_path, {"model_type": "llama", **common_config(100), "hidden_size": str(HIDDEN)})


def test_a_head_that_is_tied_is_read_where_it_is(tmp_path: Path) -> None:
    tied = {"model_type": "llama", **common_config(100), "tie_word_embeddings": True}
    assert decoder_of(tmp_path, tied, EMBEDDING).places([EMBEDDING], head=True) == {EMBEDDING: EMBEDDING}
    assert decoder_of(tmp_path, tied, HEAD).places([EMBEDDING]) == {EMBEDDING: HEAD}
    both = decoder_of(tmp_path, tied, EMBEDDING, HEAD)
    assert both.places([EMBEDDING], head=True) == {EMBEDDING: HEAD}
    assert both.places([EMBEDDING]) == {EMBEDDING: EMBEDDING}


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    apart = {"model_type": "llama", **common_config(100), "tie_word_embeddings": False}
    with pytest.raises(PackageError, match=r"lacks lm_head\.weight: fetch it again"):
        decoder_of(tmp_path, apart, EMBEDDING).places([HEAD], head=True)
