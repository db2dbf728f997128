"""Exports a causal language model (GGUF file, OpenVINO IR or checkpoint) to a model package.

Start reading at `request.py`. `package/from_graph.py` cuts a whole graph into parts (`sources/`, `graph/`);
`package/from_checkpoint.py` makes the parts of a checkpoint one at a time (`checkpoint/`).
"""
