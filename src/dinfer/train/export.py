"""Writes a trained model as a checkpoint folder in the Hugging Face form of its family."""

import json
from pathlib import Path
from types import ModuleType

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from dinfer.nn.transformer import Transformer
from dinfer.nn.weight_map import official
from dinfer.train.corpus import END, EOS, MASK, START, TEMPLATE
from dinfer.train.recipe import Recipe


@torch.no_grad()
def read_export(folder: Path, family: ModuleType, model: Transformer) -> None:
    """Weights of an exported folder, back into a model of the same sizes."""
    tensors, parameters = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name, slot in family.slots(model.shape).items():
        slot.of(parameters[slot.parameter]).copy_(tensors[name])


def export(
    folder: Path,
    family: ModuleType,
    recipe: Recipe,
    model: Transformer,
    tokenizer: tokenizers.Tokenizer,
    card: str,
) -> None:
    """Weights in bfloat16 under their official names, configs, tokenizer, chat template and the
    card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in official(model, family.slots(model.shape)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": recipe.config,
        "generation_config.json": recipe.generation,
        "tokenizer_config.json": {
            "chat_template": TEMPLATE, "eos_token": EOS, "pad_token": EOS, "mask_token": MASK,
            "additional_special_tokens": [START, END], "add_bos_token": False,
        },
        "dinfer.json": recipe.facts,
    }  # fmt: skip
    for file, content in files.items():
        (folder / file).write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    (folder / "README.md").write_text(card, encoding="utf-8")
