"""What is read as a whole graph: GGUF files and OpenVINO IRs."""
