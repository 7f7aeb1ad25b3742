"""Rewrites a checkpoint with its layers' weights as codes, file by file, so that it loads quickly.

The tensors keep their official names; the scales of NAME are NAME_scale.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dinfer.errors import RequestError
from dinfer.loader.checkpoint import Folder
from dinfer.loader.files import INDEX, SINGLE
from dinfer.loader.load import TEXTS, blank, choose_family, fit, locate, stored_quant
from dinfer.loader.weights import by_file, check, fill, places
from dinfer.nn.quantized import QuantizedWeight


def quantize(
    source: str, target: Path, scheme: str, family: str | None = None
) -> Iterator[tuple[Path, int]]:
    """Writes the checkpoint `source` to the folder `target` in the scheme of a spec string.

    Yields each file of weights when it is written, with its size in bytes; at most one of them is
    in memory. config.json comes last: a folder without it is no checkpoint.
    """
    folder = locate(source)
    if not folder.is_dir():
        raise RequestError(
            f"{source!r} is a file, whose weights may be rounded already; give the folder of the"
            " original checkpoint, or load the file with quant."
        )
    checkpoint = Folder(folder)
    config = checkpoint.json("config.json")
    if stored_quant(checkpoint) is not None:
        raise RequestError(f"{source!r} is quantized already; give the original checkpoint.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"{target} exists and is no empty folder; give another one.")
    module = choose_family(checkpoint, family)
    if family is not None:
        config = config | {"architectures": list(module.ARCHITECTURES[:1])}
    shape, tensors = fit(module, checkpoint)
    parts = places(blank(module, shape, torch.bfloat16, scheme), module.slots(shape))
    check(parts, tensors)
    if shape.tied != module.shape(config).tied:  # a head of its own, whatever the config says
        config = config | {"tie_word_embeddings": False, "weight_tying": False}
    target.mkdir(parents=True, exist_ok=True)
    table: dict[str, str] = {}
    for path, names in by_file(tensors).items():
        written: dict[str, torch.Tensor] = {}
        for name in names:
            header, part = tensors.headers[name], parts[name]
            if isinstance(part, QuantizedWeight):
                place = part.scheme.empty(*header.shape)
                written[name], written[f"{name}_scale"] = place
                fill(QuantizedWeight(part.scheme, *place, header.shape), tensors.pieces(name))
            else:
                written[name] = torch.empty(header.shape, dtype=header.dtype)
                fill(written[name], tensors.pieces(name))
        file = target / f"{path.stem.replace('pytorch_model', 'model')}.safetensors"
        save_file(written, file, metadata={"format": "pt"})
        table |= dict.fromkeys(written, file.name)
        yield file, file.stat().st_size
    _write_texts(folder, target, config, table, scheme)


def _write_texts(
    folder: Path, target: Path, config: dict[str, Any], table: dict[str, str], scheme: str
) -> None:
    for pattern in TEXTS:
        for path in folder.glob(pattern):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    if set(table.values()) != {SINGLE}:
        _write(target / INDEX, {"metadata": {}, "weight_map": table})
    method = {"quant_method": "dinfer", "scheme": scheme}
    _write(target / "config.json", config | {"quantization_config": method})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
