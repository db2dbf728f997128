"""Several tokens a trip: drafts, verification, and how far ahead to guess."""
