"""What experiments share: processes, peers, users, distances, prompts."""
