"""What a peer tells the directory and Prometheus."""
