"""Which files of a folder hold its weights, and files that are not what their name says."""

from pathlib import Path

from dinfer.errors import CheckpointError
from dinfer.text.tokenizer import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMS = (
    (SINGLE, INDEX),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""A single file or else the index of several, in the order in which transformers looks for them."""
_BUFFERS = ("inv_freq", "cos_cached", "sin_cached", "masked_bias", "position_ids")


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """The names of the tensors in each file, by the index; none for a single file, which tells them
    itself. Raises CheckpointError where there is neither, or files that the index names are not
    there.
    """
    for single, index in _FORMS:
        if (folder / single).is_file():
            return {folder / single: []}
        if (folder / index).is_file():
            return _listed(folder / index)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    said = f" (it holds {', '.join(others)})" if others else ""
    wanted = ", ".join(name for form in _FORMS for name in form)
    raise CheckpointError(f"{folder} holds no weights: none of {wanted}{said}.")


def _listed(index: Path) -> dict[Path, list[str]]:
    folder, table = index.parent, read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(
            f"{index.name} in {folder} holds no weight_map of tensor names to files."
        )
    files: dict[Path, list[str]] = {folder / file: [] for file in sorted(set(table.values()))}
    for name, file in table.items():
        files[folder / file].append(name)
    if gone := [path.name for path in files if not path.is_file()]:
        raise CheckpointError(
            f"{len(gone)} of the {len(files)} files that {index.name} names are not in {folder}:"
            f" {', '.join(gone)}; download them again."
        )
    return files


def carries_weights(name: str, unused: tuple[str, ...]) -> bool:
    """Whether a tensor of this name is wanted: none whose name begins as `unused` says, and no
    buffer that older code saved with the weights and that is computed here.
    """
    return not name.startswith(unused) and not name.endswith(_BUFFERS)
