"""Sources that are read as a whole graph: GGUF files and OpenVINO IRs."""
