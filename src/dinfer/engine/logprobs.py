"""Probabilities of a canvas's tokens, as they were when each was set, and their logarithms."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dinfer.request import SamplingParams

LEAST = 1e-38
"""Probabilities below count as this one, so that every logarithm is finite."""

Top = list[list[tuple[int, float]]]


class Logprobs:
    """Of every position its own token, and the `top_logprobs` likeliest ones that it was chosen
    from.
    """

    def __init__(self, length: int, params: SamplingParams) -> None:
        self._params = params
        self._own = np.zeros(length)
        self._likely = np.zeros((length, params.top_logprobs), np.int64)
        self._theirs = np.zeros((length, params.top_logprobs))

    def note(
        self,
        positions: npt.NDArray[np.int64],
        own: npt.NDArray[np.float32],
        likely: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None,
    ) -> None:
        """Keeps the probability of what was set [P], and the likeliest tokens with theirs
        [P, TOP].
        """
        self._own[positions] = own
        if likely is not None:
            tokens, chances = (x[:, : self._params.top_logprobs] for x in likely)
            width = tokens.shape[1]
            self._likely[positions, :width] = tokens
            self._theirs[positions, :width] = chances

    def move(self, place: int, count: int) -> None:
        """What lies from `place` on goes `count` positions on."""
        for kept in (self._own, self._likely, self._theirs):
            kept[place + count :] = kept[place:-count].copy()

    def probabilities(self, positions: npt.NDArray[np.int64]) -> list[float]:
        """Of the tokens in some positions."""
        found: list[float] = self._own[positions].tolist()
        return found

    def of(self, part: slice) -> tuple[list[float] | None, Top | None]:
        """Log probabilities in some positions: of their tokens, and the likeliest tokens with
        theirs; None for what the request does not ask for.
        """
        own = _logs(self._own[part]) if self._params.logprobs else None
        pairs = zip(self._likely[part].tolist(), _logs(self._theirs[part]), strict=True)
        top = [list(zip(*pair, strict=True)) for pair in pairs]
        return own, top if self._params.top_logprobs else None


def _logs(chances: npt.NDArray[np.float64]) -> Any:
    """Their logarithms, as lists."""
    return np.log(np.maximum(chances, LEAST)).tolist()
