"""KV cache in blocks, many sessions in one inference."""
