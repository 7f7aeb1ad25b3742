"""The nouns of the engine (glossary to come)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Facts of a checkpoint, read from its own files.

    block_length: length of the block-causal blocks, counted from position 0; None = full attention.
    eos_ids: every id that ends an answer. context: positions the model was made for.
    iteration, cache, decoder: recommended strategies as spec strings.
    """

    mask_id: int
    eos_ids: frozenset[int]
    block_length: int | None
    context: int
    iteration: str
    cache: str
    decoder: str
