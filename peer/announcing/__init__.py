"""What a peer publishes: its notices in the directory, its metrics for Prometheus."""
