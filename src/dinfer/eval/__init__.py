"""Measuring answers: accuracy, facts, BLEU, and what they cost."""
