"""Attention of a ragged batch over the paged KV cache: metadata, backend, and its operations."""
