"""A Hugging Face model cut down to one of its layers: its config, and the weights for it.

The layer keeps everything that its place gives it: what a config says layer by layer is sliced, and what a layer
asks by its number is answered for the number 0. The vocabulary shrinks to a few tokens, so that embedding and head,
which every traced model has, weigh nothing.
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
from export.checkpoint.families import described
from export.checkpoint.torch_stack import load_transformers, quiet, versions
from export.sources.source import last_line
from swarm.errors import DamagedFile, PackageError, UnsupportedModel

TINY_VOCABULARY = 48
# Lists with one entry a layer are sliced; these hold layer numbers instead.
_BY_NUMBER = ("mlp_only_layers",)
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Decoder:
    """What transformers says of a checkpoint's model: its config object, its class, where its layers are."""

    checkpoint: Checkpoint
    config: Any
    model_class: Any

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Decoder:
        """Raises UnsupportedModel where transformers knows no causal language model of this type, PackageError for a
        config.json that it cannot read. Code that came with the checkpoint is not run, and not asked for.
        """
        transformers = load_transformers()
        from huggingface_hub.errors import StrictDataclassError  # a value of another type than the config's

        kind = str(checkpoint.config.get("model_type") or "")
        if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
            raise UnsupportedModel(
                f"transformers has no models of the type {kind!r}, and code from {checkpoint.directory} is not run: "
                f"take a GGUF file or an OpenVINO IR of the model ({described(versions())})"
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
        config.name_or_path = ""  # where the checkpoint lies on this machine is no part of the model
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
            raise UnsupportedModel(f"{self.model_class.__name__} has no list of layers that could be taken apart")
        return str(min(lists, key=lambda name: name.count(".")))

    def one_layer(self, layer: int, *, vocabulary: int = TINY_VOCABULARY) -> Any:
        """The config of a model with layer `layer` alone and a vocabulary of `vocabulary` tokens."""
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
        """Equal for layers of one structure, which one traced graph can serve."""
        named = self._named(layer)
        shapes = {new: [self.checkpoint.tensors[old].dtype, *self.checkpoint.tensors[old].shape] for new, old in named}
        return json.dumps([self.one_layer(layer).to_dict(), shapes], sort_keys=True, default=str)

    def require_separable(self) -> None:
        """Compare what each layer is told at its place with what it is told alone; no weight is made for it.

        Raises UnsupportedModel naming what differs: such a layer would be another one in a model of its own, and
        comparing it with transformers, which is done one layer at a time, would not show it.
        """
        import torch

        alone: dict[str, dict[str, object]] = {}
        with quiet(), torch.device("meta"):
            stack = self.model_class(self.config).get_submodule(self.stack)
            for layer in range(self.layers):
                config = self.one_layer(layer)
                key = json.dumps(config.to_dict(), sort_keys=True, default=str)
                if key not in alone:
                    alone[key] = _settings(self.model_class(config).get_submodule(self.stack)[0])
                there = _settings(stack[layer])
                for name in sorted(there.keys() | alone[key].keys()):
                    found, expected = there.get(name), alone[key].get(name)
                    is_number = type(found) is int and (found, expected) == (layer, 0)
                    if found != expected and not is_number:
                        raise UnsupportedModel(
                            f"{self.config.model_type}: {name} is {found} in layer {layer} and would be {expected} in "
                            f"a model of this layer alone, so that it cannot be exported on its own "
                            f"({described(versions())})"
                        )

    def places(self, names: Iterable[str], *, head: bool = False) -> dict[str, str]:
        """name -> under which name the checkpoint has that tensor, for tensors outside the layers.

        A tied one may be there under the other's name. Where both are there, the `head` takes its own, as transformers
        does. Raises PackageError naming those that are missing.
        """
        ties: dict[str, str] = {}
        if getattr(self.config, "tie_word_embeddings", False):
            ties = dict(getattr(self.model_class, "_tied_weights_keys", None) or {})
        found, missing = {}, []
        for name in names:
            tied = [other for pair in ties.items() if name in pair for other in pair if other != name]
            own = sorted([name, *tied], key=lambda other: other not in ties) if head else [name, *tied]
            place = next((other for other in own if other in self.checkpoint.tensors), None)
            if place is None:
                missing.append(name)
            else:
                found[name] = place
        if missing:
            raise PackageError(f"{self.checkpoint.directory} lacks {', '.join(sorted(missing))}: fetch it again")
        return found

    @cached_property
    def outer_tensors(self) -> list[str]:
        """The names in the checkpoint of what belongs to no layer."""
        return [name for name in sorted(self.checkpoint.tensors) if not self._number(name)]

    def layer_tensors(self, layer: int) -> list[str]:
        """The names in the checkpoint of what belongs to a layer. Raises PackageError where there is nothing."""
        return [old for _, old in self._named(layer)]

    def load_layer(
        self, layer: int, *, exact: bool = False, ends: bool = False, vocabulary: int = TINY_VOCABULARY
    ) -> Any:
        """A transformers model with the layer's weights, over the mapped files where their layout is the model's.

        `exact` makes it f32, eager, ready to be compared with; else weights keep the checkpoint's type. With `ends` it
        has the true embedding, last norm and head too, of the first `vocabulary` tokens. Raises DamagedFile,
        PackageError where weights do not fit the config.
        """
        import torch

        state = self.checkpoint.read(old for _, old in self._named(layer))
        state = {new: state[old] for new, old in self._named(layer)}
        if ends:
            outer = self.checkpoint.read(self.outer_tensors)
            state |= {name: first_rows(tensor, self.config.vocab_size, vocabulary) for name, tensor in outer.items()}
        dtype = torch.float32 if exact else widest(tensor.dtype for tensor in state.values())
        try:
            with quiet():
                model, told = self.model_class.from_pretrained(
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
        wrong = [str(key) for what in ("missing_keys", "mismatched_keys") for key in told[what]]
        wrong = [key for key in wrong if ends or f"{self.stack}." in key]
        more = [key for key in map(str, told["unexpected_keys"]) if f"{self.stack}." in key]
        if wrong or more:
            raise PackageError(
                f"layer {layer} of {self.checkpoint.directory} lacks {', '.join(wrong[:3]) or 'nothing'} and has "
                f"{', '.join(more[:3]) or 'nothing'} too many for a {self.config.model_type}"
            )
        return model.eval()

    def _named(self, layer: int) -> list[tuple[str, str]]:
        """(name in the one-layer model, name in the checkpoint) of each tensor."""
        if layer not in self._by_layer:
            raise PackageError(
                f"{self.checkpoint.directory} has no tensors {self.stack}.{layer}.*: the checkpoint is not whole"
            )
        return self._by_layer[layer]

    @cached_property
    def _by_layer(self) -> dict[int, list[tuple[str, str]]]:
        """`_named` of all layers. Models of many experts have tens of thousands of tensors."""
        found: dict[int, list[tuple[str, str]]] = {}
        for name in sorted(self.checkpoint.tensors):
            if match := self._number(name):
                found.setdefault(int(match[1]), []).append((f"{self.stack}.0.{match[2]}", name))
        return found

    def _number(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(rf"{re.escape(self.stack)}\.(\d+)\.(.+)", name)


def first_rows(tensor: Any, rows: int, count: int) -> Any:
    """The first `count` rows of what has `rows`, one for each token; anything else as it is."""
    return tensor[:count] if tensor.dim() and len(tensor) == rows else tensor


def _settings(layer: Any) -> dict[str, object]:
    """What a layer's modules are, and the plain values that they were told."""
    found: dict[str, object] = {}
    for path, module in layer.named_modules():
        found[path or "the layer"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def widest(dtypes: Any) -> Any:
    """The floating type that holds all of them exactly."""
    import torch

    found = {dtype for dtype in dtypes if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else torch.float32
