"""Text to ids and back: the tokenizer, the settled text of a growing answer, the chat template."""
