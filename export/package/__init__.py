"""Writing a model package, from a graph or from a checkpoint, and describing one."""
