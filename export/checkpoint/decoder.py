"""A Hugging Face model reduced to one of its layers: its config and its weights.

The layer keeps the settings of its position: config lists with one entry per layer are sliced, and settings by layer
number are rewritten for layer 0. The vocabulary shrinks to a few tokens, so that embedding and head, which every traced
model has, take hardly any memory.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.families import format_versions
from export.checkpoint.torch_stack import load_transformers, quiet, versions
from export.sources.source import last_line
from swarm.errors import DamagedFile, PackageError, UnsupportedModel

TINY_VOCABULARY = 48
# Lists with one entry per layer are sliced; these lists contain layer numbers instead.
_BY_NUMBER = ("mlp_only_layers",)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Decoder:
    """A checkpoint's model in transformers: its config object, its class, and the location of its layers."""

    checkpoint: Checkpoint
    config: Any
    model_class: Any

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Decoder:
        """Raises UnsupportedModel if transformers has no causal language model of this type, PackageError for a
        config.json that it cannot read. Code in the checkpoint is never run.
        """
        transformers = load_transformers()
        from huggingface_hub.errors import StrictDataclassError  # raised for a config value of a wrong type

        kind = str(checkpoint.config.get("model_type") or "")
        if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise UnsupportedModel(
                f"transformers has no models of the type {kind!r}, and code from {checkpoint.directory} is not run: "
                f"take a GGUF file or an OpenVINO IR of the model ({format_versions(versions())})"
            )
        try:
            with quiet():
                config = transformers.AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, OSError, AttributeError, StrictDataclassError) as error:
            raise PackageError(
                f"transformers cannot read {checkpoint.directory}/config.json ({last_line(error)}): fetch it again"
            ) from error
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in known or not isinstance(getattr(config, "num_hidden_layers", None), int):
            raise UnsupportedModel(
                f"transformers {transformers.__version__} has no causal language model for "
                f"{checkpoint.config.get('model_type')!r}: only text models can be exported"
            )
        config.name_or_path = ""  # The local path is not part of the model.
        return cls(checkpoint, config, known[type(config)])

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def stack(self) -> str:
        """The name of the list of layers within the model: `model.layers`."""
        import torch

        with quiet(), torch.device("meta"):
            model = self.model_class(self.one_layer(0))
        lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
        if not lists:
            raise UnsupportedModel(f"{self.model_class.__name__} has no list of layers and cannot be split into layers")
        return str(min(lists, key=lambda name: name.count(".")))

    def one_layer(self, layer: int, *, vocabulary: int = TINY_VOCABULARY) -> Any:
        """The config of a model with only layer `layer` and a vocabulary of `vocabulary` tokens."""
        config = copy.deepcopy(self.config)
        for name, value in list(vars(config).items()):
            if isinstance(value, (list, tuple)) and len(value) == self.layers and name not in _BY_NUMBER:
                setattr(config, name, [value[layer]])
        if hasattr(config, "decoder_sparse_step"):
            dense = layer in (config.mlp_only_layers or []) or (layer + 1) % config.decoder_sparse_step != 0
            config.mlp_only_layers, config.decoder_sparse_step = ([0] if dense else []), 1
        config.num_hidden_layers, config.vocab_size = 1, vocabulary
        if vocabulary != self.config.vocab_size:
            for name in _TOKENS:
                setattr(config, name, None)
        return config

    def kind(self, layer: int) -> str:
        """A key that is equal for layers of equal structure, which can share a traced graph."""
        named = self._tensor_names(layer)
        shapes = {new: [self.checkpoint.tensors[old].dtype, *self.checkpoint.tensors[old].shape] for new, old in named}
        return json.dumps([self.one_layer(layer).to_dict(), shapes], sort_keys=True, default=str)

    def require_separable(self) -> None:
        """Check that each layer has the same settings in the whole model as in a model of this layer alone.

        No weights are allocated. Raises UnsupportedModel naming a setting that differs: such a layer would compute
        something else on its own, and the comparison with transformers, one layer at a time, would not detect it.
        """
        import torch

        single: dict[str, dict[str, object]] = {}
        with quiet(), torch.device("meta"):
            stack = self.model_class(self.config).get_submodule(self.stack)
            for layer in range(self.layers):
                config = self.one_layer(layer)
                key = json.dumps(config.to_dict(), sort_keys=True, default=str)
                if key not in single:
                    single[key] = _settings(self.model_class(config).get_submodule(self.stack)[0])
                whole = _settings(stack[layer])
                for name in sorted(whole.keys() | single[key].keys()):
                    found, expected = whole.get(name), single[key].get(name)
                    is_number = type(found) is int and (found, expected) == (layer, 0)
                    if found != expected and not is_number:
                        raise UnsupportedModel(
                            f"{self.config.model_type}: {name} is {found} in layer {layer} but {expected} in a model "
                            "of this layer alone: the layer cannot be exported on its own "
                            f"({format_versions(versions())})"
                        )

    def checkpoint_names(self, names: Iterable[str], *, head: bool = False) -> dict[str, str]:
        """name -> the checkpoint's name of that tensor, for tensors outside the layers.

        A tied tensor may be stored under the other's name. If both are stored, the `head` uses its own, as transformers
        does. Raises PackageError naming missing tensors.
        """
        ties: dict[str, str] = {}
        if getattr(self.config, "tie_word_embeddings", False):
            ties = dict(getattr(self.model_class, "_tied_weights_keys", None) or {})
        found, missing = {}, []
        for name in names:
            tied = [other for pair in ties.items() if name in pair for other in pair if other != name]
            candidates = sorted([name, *tied], key=lambda other: other not in ties) if head else [name, *tied]
            stored = next((other for other in candidates if other in self.checkpoint.tensors), None)
            if stored is None:
                missing.append(name)
            else:
                found[name] = stored
        if missing:
            raise PackageError(f"{self.checkpoint.directory} lacks {', '.join(sorted(missing))}: fetch it again")
        return found

    @cached_property
    def outer_tensors(self) -> list[str]:
        """The checkpoint's names of the tensors outside the layers."""
        return [name for name in sorted(self.checkpoint.tensors) if not self._match_layer(name)]

    def layer_tensors(self, layer: int) -> list[str]:
        """The checkpoint's names of a layer's tensors. Raises PackageError if there are none."""
        return [old for _, old in self._tensor_names(layer)]

    def load_layer(
        self, layer: int, *, exact: bool = False, with_ends: bool = False, vocabulary: int = TINY_VOCABULARY
    ) -> Any:
        """A transformers model of the layer. Its weights are not copied from the mapped files if their layout fits.

        `exact` makes it f32 and eager, as a reference; else weights keep their type. `with_ends` adds the real
        embedding, last norm and head, for `vocabulary` tokens. Raises DamagedFile or PackageError if weights do
        not fit the config.
        """
        import torch

        state = self.checkpoint.read(old for _, old in self._tensor_names(layer))
        state = {new: state[old] for new, old in self._tensor_names(layer)}
        if with_ends:
            outer = self.checkpoint.read(self.outer_tensors)
            state |= {name: first_rows(tensor, self.config.vocab_size, vocabulary) for name, tensor in outer.items()}
        dtype = torch.float32 if exact else widest(tensor.dtype for tensor in state.values())
        try:
            with quiet():
                model, loading = self.model_class.from_pretrained(
                    None,
                    config=self.one_layer(layer, vocabulary=vocabulary),
                    state_dict=state,
                    dtype=dtype,
                    attn_implementation="eager" if exact else None,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise DamagedFile(
                f"layer {layer} of {self.checkpoint.directory} does not fit its config.json ({last_line(error)}): "
                "fetch the checkpoint again"
            ) from error
        lacking = [str(key) for kind in ("missing_keys", "mismatched_keys") for key in loading[kind]]
        lacking = [key for key in lacking if with_ends or f"{self.stack}." in key]
        unexpected = [key for key in map(str, loading["unexpected_keys"]) if f"{self.stack}." in key]
        if lacking or unexpected:
            raise PackageError(
                f"layer {layer} of {self.checkpoint.directory} does not fit a {self.config.model_type}: it lacks "
                f"{', '.join(lacking[:3]) or 'nothing'} and also has {', '.join(unexpected[:3]) or 'nothing'}"
            )
        return model.eval()

    def _tensor_names(self, layer: int) -> list[tuple[str, str]]:
        """(name in the one-layer model, name in the checkpoint) of each tensor."""
        if layer not in self._by_layer:
            raise PackageError(
                f"{self.checkpoint.directory} has no tensors {self.stack}.{layer}.*: the checkpoint is incomplete"
            )
        return self._by_layer[layer]

    @cached_property
    def _by_layer(self) -> dict[int, list[tuple[str, str]]]:
        """`_tensor_names` of all layers, cached: models with many experts have tens of thousands of tensors."""
        found: dict[int, list[tuple[str, str]]] = {}
        for name in sorted(self.checkpoint.tensors):
            if match := self._match_layer(name):
                found.setdefault(int(match[1]), []).append((f"{self.stack}.0.{match[2]}", name))
        return found

    def _match_layer(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(rf"{re.escape(self.stack)}\.(\d+)\.(.+)", name)


def first_rows(tensor: Any, rows: int, count: int) -> Any:
    """The first `count` rows of a tensor with `rows` rows, one for each token; other tensors unchanged."""
    return tensor[:count] if tensor.dim() and len(tensor) == rows else tensor


def _settings(layer: Any) -> dict[str, object]:
    """The classes of a layer's modules, and the plain values among their attributes."""
    found: dict[str, object] = {}
    for path, module in layer.named_modules():
        found[path or "the layer"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def widest(dtypes: Any) -> Any:
    """A floating type that represents all of `dtypes` exactly."""
    import torch

    found = {dtype for dtype in dtypes if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else torch.float32
