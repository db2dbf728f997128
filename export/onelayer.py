"""A Hugging Face model cut down to one of its layers: its config, and the weights for it.

The layer keeps everything that its place gives it: what a config says layer by layer is sliced, and what a layer
asks by its number is answered for the number 0. The vocabulary shrinks to a few tokens, so that embedding and head,
which every traced model has, weigh nothing.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from export.checkpoint import Checkpoint
from export.source import last_line
from export.torch_stack import load_transformers, quiet
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
        """Raises UnsupportedModel where transformers knows no causal language model of this type."""
        transformers = load_transformers()
        try:
            with quiet():
                config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            raise PackageError(
                f"transformers cannot read {checkpoint.directory}/config.json ({last_line(error)}): fetch it again"
            ) from error
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in known or not isinstance(getattr(config, "num_hidden_layers", None), int):
            raise UnsupportedModel(
                f"transformers {transformers.__version__} has no causal language model for "
                f"{checkpoint.config.get('model_type')!r}: only text models can be exported"
            )
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

    def layer_tensors(self, layer: int) -> list[str]:
        """The names in the checkpoint of what belongs to a layer. Raises PackageError where there is nothing."""
        return [old for _, old in self._named(layer)]

    def load_layer(self, layer: int, *, exact: bool = False, vocabulary: int = TINY_VOCABULARY) -> Any:
        """A transformers model with the layer's weights, over the mapped files where their layout is the model's.

        `exact` makes it f32, eager, ready to be compared with; else weights keep the checkpoint's type. With the
        true `vocabulary` it has the true embedding, last norm and head too. Raises DamagedFile, PackageError where
        weights do not fit the config.
        """
        import torch

        state = self.checkpoint.read(old for _, old in self._named(layer))
        state = {new: state[old] for new, old in self._named(layer)}
        ends = vocabulary == self.config.vocab_size
        if ends:
            state |= self.checkpoint.read(name for name in self.checkpoint.tensors if not self._number(name))
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
        if wrong or told["unexpected_keys"]:
            raise PackageError(
                f"layer {layer} of {self.checkpoint.directory} lacks {', '.join(wrong[:3]) or 'nothing'} and has "
                f"{', '.join(list(told['unexpected_keys'])[:3]) or 'nothing'} too many for a {self.config.model_type}"
            )
        return model.eval()

    def _named(self, layer: int) -> list[tuple[str, str]]:
        """(name in the one-layer model, name in the checkpoint) of each tensor."""
        found = [
            (f"{self.stack}.0.{match[2]}", name)
            for name in sorted(self.checkpoint.tensors)
            if (match := self._number(name)) and int(match[1]) == layer
        ]
        if not found:
            raise PackageError(
                f"{self.checkpoint.directory} has no tensors {self.stack}.{layer}.*: the checkpoint is not whole"
            )
        return found

    def _number(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(rf"{re.escape(self.stack)}\.(\d+)\.(.+)", name)


def widest(dtypes: Any) -> Any:
    """The floating type that holds all of them exactly."""
    import torch

    found = {dtype for dtype in dtypes if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else torch.float32
