"""A Hugging Face checkpoint: its tensors, one layer of its model, that layer's graph, its tokenizer."""
