"""Structured output: answers that match a regular expression, a JSON schema or a list of choices,
in whatever order the positions of a canvas are set.
"""
