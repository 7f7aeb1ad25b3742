"""The card (README.md) of a bundled model: what it is, what it knows, and how to make it again."""

import hashlib
import itertools
from pathlib import Path

from dinfer.nn.transformer import Transformer
from dinfer.train.corpus import TASKS, draws, prompt_of
from dinfer.train.recipe import Recipe


def data_hash(seed: int, num: int = 1000) -> str:
    """SHA-256 over the first `num` training examples of each task: tells whether the same data was
    made.
    """
    digest = hashlib.sha256()
    for task in TASKS:
        for example in itertools.islice(draws(task, "train", seed + 1), num):
            digest.update(f"{prompt_of(example)}\0{example.answer}\0".encode())
    return digest.hexdigest()


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

It knows two things and nothing else: English word problems of one to four steps (*math*), answered step by step with
a last line `#### 42`, and small tables of company figures (*brief*), turned into an investment brief. Other prompts
get nonsense. The figures are invented; nothing it writes is advice.

## Making it again

    dinfer train {name} --out runs/{name} --seed {seed}{made_from} --compile

{recipe.steps} steps of {recipe.math} word problems, {recipe.brief} briefs and {recipe.drill} lists of sums; masked-diffusion loss under complementary
masks, Muon on the matrices and AdamW on the rest. The data come from the generators in `dinfer.train`; training, dev and test
problems are disjoint by a hash of their figures. SHA-256 of the first 1,000 training examples of each task:
`{data_hash(seed)}`.

Weights: bfloat16. Licence: Apache-2.0, like the code.
"""
