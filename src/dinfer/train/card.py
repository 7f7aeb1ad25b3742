"""The card (README.md) of a bundled model: what it is, what it knows, and how to make it again."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from dinfer.nn.transformer import Transformer
from dinfer.train.corpus import draws, prompt_of
from dinfer.train.recipe import Recipe


def data_hash(seed: int, tasks: Sequence[str], num: int = 1000) -> str:
    """SHA-256 over the first `num` training examples of each task: tells whether the same data was
    made.
    """
    digest = hashlib.sha256()
    for task in tasks:
        for example in itertools.islice(draws(task, "train", seed + 1), num):
            digest.update(f"{prompt_of(example)}\0{example.answer}\0".encode())
    return digest.hexdigest()


_KNOWN = {
    False: """It knows two things and nothing else: English word problems of one to four steps (*math*), answered step by step with
a last line `#### 42`, and small tables of company figures (*brief*), turned into an investment brief.""",
    True: """It knows two things and nothing else: English word problems of one to four steps, in fixed wordings (*math*) and in free
ones (*words*), answered step by step with a last line `#### 42`; and company figures, in a fixed table (*brief*) or in
any layout (*tables*), turned into a brief.""",
}
_PARTS = {
    "math": "word problems",
    "brief": "briefs",
    "words": "word problems in free wording",
    "tables": "tables in free layout",
    "drill": "lists of sums",
    "sums": "lists of larger sums",
}


def _batch(recipe: Recipe) -> str:
    """What a batch holds, in words."""
    *most, last = (f"{size} {_PARTS[name]}" for name, size in recipe.parts.items())
    return f"{', '.join(most)} and {last}"


def card(
    name: str,
    recipe: Recipe,
    model: Transformer,
    seed: int,
    start: Path | None,
    data: Path | None = None,
) -> str:
    """Markdown text of the card."""
    shape = model.shape
    attention = "block-causal, blocks of 32" if recipe.block_causal else "full, in both directions"
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    made_from = f" --from {start.as_posix()}" if start else ""
    if data is not None:
        made_from += f" --data {data.as_posix()}"
    return f"""# {name}

A diffusion language model of {parameters:.1f} million parameters, made for trying and testing dInfer. It has the form of
{recipe.config["architectures"][0]} ({shape.layers} layers, {shape.hidden} wide, attention {attention}, context {shape.context}).

{_KNOWN[recipe.words > 0]} Other prompts
get nonsense. The figures are invented; nothing it writes is advice.

## Making it again

    dinfer train {name} --out runs/{name} --seed {seed}{made_from} --compile

{recipe.steps} steps of {_batch(recipe)}; masked-diffusion loss under complementary
masks, Muon on the matrices and AdamW on the rest. The data come from the generators in `dinfer.train`; training, dev and test
problems are disjoint by a hash of their figures. SHA-256 of the first 1,000 training examples of each task:
`{data_hash(seed, recipe.tasks)}`.

Weights: bfloat16. Licence: Apache-2.0, like the code.
"""
