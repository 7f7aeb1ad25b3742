"""The training run of a bundled model: resumable, from a seed."""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
import torch
from torch import Tensor

from dinfer.errors import DinferError, UnknownName
from dinfer.nn import rope
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.norm import RMSNorm
from dinfer.nn.transformer import Transformer
from dinfer.registry import near
from dinfer.train.card import card
from dinfer.train.corpus import Example, Ids, draws, encode, make_tokenizer
from dinfer.train.export import export, read_export
from dinfer.train.init_from import carry_over, grow
from dinfer.train.interrupt import deferred_interrupt
from dinfer.train.loss import bidirectional_batch, block_causal_batch, masked_loss
from dinfer.train.muon import Muon
from dinfer.train.own_data import OwnExample, endless, read_examples
from dinfer.train.recipe import BLOCK, CONTEXT, EOS_ID, MASK_ID, RECIPES, Recipe

POOL = 32
"""Batches drawn at once and sorted by length, so that little of a batch is fill."""

MICRO = 16
"""Examples per forward: small enough that the activations stay in a CPU's last cache."""

SHORT = (1, 1, 2, 4)
"""Lengths of the short, all-masked blocks that every other forward trains with."""

WINDOW = 8
"""Length of the windows that the bundled models are decoded with."""

DECAY = 0.4
"""Share of the steps, at the end, over which the learning rate falls to zero."""

Report = Callable[[int, float, float], None]
"""Told after each step: number of steps done, loss, seconds of the step."""


def batches(
    tokenizer: tokenizers.Tokenizer, stream: Iterator[Example], size: int, seed: int, skip: int
) -> Iterator[list[Ids]]:
    """Endless batches of similar length from an endless stream of examples; `skip` batches are
    left out (a resumed run).
    """
    rng = random.Random(seed)
    done = 0
    while True:
        examples = [next(stream) for _ in range(POOL * size)]
        order = list(range(POOL))
        rng.shuffle(order)
        done += POOL
        if done <= skip:
            continue
        ids = sorted(
            encode(tokenizer, examples), key=lambda x: (len(x.prompt) // BLOCK, len(x.answer))
        )
        for place in order[max(0, skip - done + POOL) :]:
            yield ids[place * size : (place + 1) * size]


class Run:
    """One training run: model, optimizers, data, step count; `save` and `resume` keep them."""

    def __init__(
        self,
        recipe: Recipe,
        model: Transformer,
        seed: int,
        device: str,
        dtype: torch.dtype,
        own: Sequence[OwnExample] = (),
    ) -> None:
        self.recipe, self.model, self.seed, self.device = recipe, model.to(device), seed, device
        self.autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
        self.tokenizer = make_tokenizer(seed, recipe.config["vocab_size"], recipe.tasks)
        self.own = list(own)
        for example, ids in zip(self.own, encode(self.tokenizer, self.own), strict=True):
            if (length := len(ids.prompt) + len(ids.answer)) > CONTEXT:
                raise DinferError(
                    f"The example that begins {example.prompt[:40]!r} has {length} tokens; the "
                    f"models take {CONTEXT}."
                )
        self.step = 0
        matrices = [
            p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=recipe.muon_lr),
            torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = [recipe.muon_lr, recipe.adam_lr]

    def save(self, path: Path) -> None:
        """Writes everything a later `resume` needs."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Takes up a saved run of the same recipe and seed where it stopped."""
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def train(self, report: Report, save_to: Path | None = None, save_every: float = 120.0) -> None:
        """Runs the steps that are left; saves every `save_every` seconds and at the end. The first
        Ctrl-C lets the step come to its end and saves; then KeyboardInterrupt is raised.
        """
        streams, saved = self._streams(), time.monotonic()
        with deferred_interrupt() as asked:
            while self.step < self.recipe.steps and not asked.is_set():
                began = time.perf_counter()
                loss = self._one_step([next(stream) for stream in streams])
                self.step += 1
                report(self.step, loss, time.perf_counter() - began)
                if save_to is not None and time.monotonic() - saved > save_every:
                    self.save(save_to)
                    saved = time.monotonic()
            if save_to is not None:
                self.save(save_to)
        if asked.is_set():
            raise KeyboardInterrupt

    def _streams(self) -> list[Iterator[list[Ids]]]:
        """Batches of each task, and of the user's own examples, from the present step on."""
        sources = [
            (size, draws(task, "train", self.seed + 1)) for task, size in self.recipe.parts.items()
        ]
        if self.own:
            sources.append((self.recipe.own, endless(self.own, self.seed)))
        return [batches(self.tokenizer, s, n, self.seed, self.step) for n, s in sources]

    def _one_step(self, parts: list[list[Ids]]) -> float:
        parts = [part[i : i + MICRO] for part in parts for i in range(0, len(part), MICRO)]
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        total = 0.0
        for number, part in enumerate(parts):
            with self.autocast:
                loss = self._loss(part, rng, number) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * self._rate()
            optimizer.step()
            optimizer.zero_grad()
        return total

    def _loss(self, part: list[Ids], rng: torch.Generator, number: int) -> Tensor:
        """Blocks of the family's own attention in every other forward; else blocks that see what is
        before them alone: short and all masked, for the sums that they teach, and for a
        bidirectional model also windows as it is decoded with, and those alone once the learning
        rate falls.
        """
        causal = self.recipe.block_causal
        if (self.step + number) % 2 == 0:
            make = block_causal_batch if causal else bidirectional_batch
            noised = make(part, BLOCK, MASK_ID, EOS_ID, rng)
        elif causal or (self._rate() == 1.0 and torch.rand((), generator=rng) < 0.5):
            short = SHORT[int(torch.randint(len(SHORT), (), generator=rng))]
            noised = block_causal_batch(part, short, MASK_ID, EOS_ID, rng, all_masked=True)
        else:
            noised = block_causal_batch(part, WINDOW, MASK_ID, EOS_ID, rng, one_prompt=True)
        return masked_loss(self.model, noised, MASK_ID)

    def _rate(self) -> float:
        """Warm-up over 50 steps, then flat, then linear to zero."""
        warm = min(1.0, (self.step + 1) / 50)
        return warm * min(1.0, (self.recipe.steps - self.step) / (DECAY * self.recipe.steps))


def new_model(recipe: Recipe, seed: int) -> tuple[ModuleType, Transformer]:
    """The recipe's family, and its model with first weights drawn from the seed."""
    family = import_module(f"dinfer.model.{recipe.config['model_type']}")
    model: Transformer = family.Model(family.shape(recipe.config))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return family, model


def compile_pieces(model: Transformer) -> None:
    """Compiles norms, gated MLPs and the rotation, once for all lengths; about a fifth less time
    per step on a CPU.
    """
    torch._dynamo.config.cache_size_limit = 64
    rope.rotate = torch.compile(rope.rotate, dynamic=True)
    for module in model.modules():
        if isinstance(module, RMSNorm | GatedMLP):
            module.compile(dynamic=True)


def warm_start(run: Run, folder: Path) -> None:
    """First weights from an exported model. Into the same form they may be fewer layers and other
    tokens (`grow`); into the other form, the norms are folded.
    """
    if not (folder / "config.json").is_file():
        raise DinferError(f"--from is {str(folder)!r}; give the folder of a model that train made.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family, source = new_model(replace(run.recipe, config=config), run.seed)
    read_export(folder, family, source)
    if config["model_type"] == run.recipe.config["model_type"]:
        old = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        grow(source, old, run.model, run.tokenizer)
        return
    batch = next(batches(run.tokenizer, draws("math", "train", run.seed + 1), MICRO, run.seed, 0))
    noise = torch.Generator().manual_seed(run.seed)
    target = run.model.cpu()
    carry_over(source, target, bidirectional_batch(batch, BLOCK, MASK_ID, EOS_ID, noise))
    run.model = target.to(run.device)


@dataclass(frozen=True)
class TrainOptions:
    """Where and how `dinfer train` runs: folder of the run, seed, steps (None: the recipe's), a
    model to start from, threads, compiled pieces, arithmetic of the products, device, a JSONL file
    of the user's own examples that each step trains on too.
    """

    out: Path
    seed: int = 0
    steps: int | None = None
    start: Path | None = None
    threads: int | None = None
    compiled: bool = False
    dtype: str = "float32"
    device: str = "auto"
    data: Path | None = None


def train_bundled(
    name: str, options: TrainOptions, report: Callable[[int, int, float, float], None]
) -> Path:
    """`dinfer train`: runs or resumes a recipe in the folder `out` and writes the model to
    `out/model`. `report` is told step, steps, loss, seconds.
    """
    if name not in RECIPES:
        raise UnknownName(f"Unknown model to train {name!r}.{near(name, list(RECIPES))}")
    if options.dtype not in ("float32", "bfloat16"):
        raise DinferError(f"dtype is {options.dtype!r}; train takes float32 or bfloat16.")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    device = usual if options.device == "auto" else options.device
    recipe = RECIPES[name] if options.steps is None else replace(RECIPES[name], steps=options.steps)
    family, model = new_model(recipe, options.seed)
    own = read_examples(options.data) if options.data is not None else []
    run = Run(recipe, model, options.seed, device, getattr(torch, options.dtype), own)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    state = out / "state.pt"
    if state.is_file():
        run.resume(state)
    elif options.start is not None:
        warm_start(run, options.start)
    if options.compiled:
        compile_pieces(run.model)
    run.train(lambda step, loss, seconds: report(step, recipe.steps, loss, seconds), state)
    text = card(name, recipe, run.model, options.seed, options.start, options.data)
    export(out / "model", family, recipe, run.model, run.tokenizer, text)
    return out / "model"
