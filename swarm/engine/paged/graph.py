"""Converts a span's stateful graph to one with paged attention, for many sessions at once.

::

    before   input_ids [1, n] or hidden_states [1, n, hidden], attention_mask, beam_idx, ReadValue/Assign a layer
    after    input_ids [t] or hidden_states [t, hidden]        the tokens of all sessions, one after another
             position_ids [t] i64                              each token's position in its session
             past_lens [s], subsequence_begins [s + 1] i32     each session's cached length; offset of its tokens
             block_indices [b], block_indices_begins [s + 1]   each session's blocks, in order; their offset
             max_context_len [] i32                            the longest session, its new tokens included
             key_cache.i, value_cache.i [blocks, ...]          of the span's layer i; allocated by the caller
    output   hidden_states_out [t, 1, hidden], or logits [m, 1, vocab] of the rows `logit_rows` [m] among the t

Sliding windows, attention sinks and soft-caps become attributes of the attention. A window counts positions here.
"""

from __future__ import annotations

import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from swarm.errors import UnsupportedModel


def to_paged(model: ov.Model, hidden_size: int) -> ov.Model:
    """Convert `model`, composed with `rows_axis=0`, in place. Raises UnsupportedModel if it cannot be converted."""
    hidden = [p for p in model.get_parameters() if "hidden_states" in p.output(0).get_names()]
    for parameter in hidden:
        parameter.output(0).tensor.add_names({"inputs_embeds"})  # the name that the transformation looks for
    try:
        paged_attention_transformation(model)
        for parameter in hidden:
            parameter.set_partial_shape(ov.PartialShape([-1, hidden_size]))
        model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UnsupportedModel(f"{model.get_friendly_name()} cannot have paged attention: {reason}") from error
    return model
