"""Known tokens in, the next token out, over a route that is repaired as needed."""
