"""The paged KV cache: page pool, block tables, prefix cache."""
