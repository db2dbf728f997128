"""Known tokens in, the next token out, over a route that is repaired when a peer fails."""
