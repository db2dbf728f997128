"""Several tokens a trip: drafts, verification, and how many guesses to send."""
