"""From a causal LM, as a GGUF file or an OpenVINO IR, to a model package.

`package.py` is where to start reading. The sources end in one form (`source.py`); `graph.py` finds
the layers in it and `cut.py` cuts them out.
"""
