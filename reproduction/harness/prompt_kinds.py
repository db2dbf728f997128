"""Eight kinds of prompts for experiments with drafts, each with the published figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """`gain` and `acceptance` as published (arXiv 2608.19147) with 3 guesses per trip; the mean if unpublished."""

    name: str
    prompt: str
    gain: float
    acceptance: float = 0.707


KINDS = (
    Kind("factual", "What is the capital of France, and what is it known for?", 1.30),
    Kind(
        "reasoning", "If a train travels 60 km in 45 minutes, how far does it go in 2 hours? Explain each step.", 1.37
    ),
    Kind("code", "Write a Python function that returns the first n Fibonacci numbers, with comments.", 1.50, 0.93),
    Kind("list", "List ten kinds of fruit, and one sentence about each.", 1.31),
    Kind("creative", "Write a short story about a lighthouse keeper who finds a letter in a bottle.", 1.11, 0.50),
    Kind("explanation", "Explain how photosynthesis works to a child.", 1.19),
    Kind("chat", "Hello! I had a long day at work. What can I do to relax this evening?", 1.34),
    Kind("translation", "Translate into French: The weather is nice today and we are going to the market.", 1.48),
)
