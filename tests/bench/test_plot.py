"""Plots: what can be checked without looking at them."""

import math
import random
from pathlib import Path

import numpy as np

from dinfer.bench.plot import _offsets, points


def test_numbers_stand_apart_from_points_and_from_one_another() -> None:
    rng = random.Random(2)
    spots = [(rng.uniform(0, 900), rng.uniform(0, 600)) for _ in range(30)] + [(450.0, 300.0)] * 3
    places = [
        (x + dx, y + dy) for (x, y), (dx, dy) in zip(spots, _offsets(np.array(spots)), strict=True)
    ]
    for number, place in enumerate(places):
        others = places[:number] + places[number + 1 :]
        assert min(math.dist(place, other) for other in [*others, *spots]) > 7


def test_a_plot_of_points_is_written(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    points(file, [(1.0, 90.0, "a", True), (9.0, 80.0, "b", False)], "title", "seconds", "right")
    assert file.read_bytes().startswith(b"\x89PNG")
