"""From a prompt to text: tokenizer, token loop, detokenizer, conversations."""
