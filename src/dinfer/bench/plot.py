"""Plots of results (matplotlib, extra `bench`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dinfer.errors import DinferError


def lines(
    file: Path,
    series: dict[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    across: str,
    up: str,
) -> None:
    """Writes named lines (x values, y values), x on a scale of powers of two, to an image file."""
    figure, axes = _figure(title, across, up)
    for name, (x, y) in series.items():
        axes.plot(x, y, marker="o", label=name)
    axes.set_xscale("log", base=2)
    highest = max(value for _, y in series.values() for value in y)
    axes.set_ylim(0, 1.1 * highest)
    axes.legend()
    _save(figure, file)


def points(
    file: Path, found: Sequence[tuple[float, float, str, bool]], title: str, across: str, up: str
) -> None:
    """Writes points (x on a scale of logarithms, y, name, whether on the front) to an image file,
    with numbers that a list beside them explains; the front is joined by a line.
    """
    figure, axes = _figure(title, across, up, (10, 5.6))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    best = sorted((x, y) for x, y, _, front in found if front)
    axes.tick_params(which="both", length=3, pad=4)
    (line,) = axes.plot(*zip(*best, strict=True), color="tab:red", zorder=1)
    for x, y, _, front in found:
        axes.scatter(x, y, s=18, color="tab:red" if front else "tab:gray", zorder=2)
    dots = [axes.scatter([], [], s=18, color="tab:red" if f else "tab:gray") for *_, f in found]
    names = [f"{number}  {name}" for number, (_, _, name, _) in enumerate(found, 1)]
    figure.legend(
        [line, *dots],
        ["no other is both better and quicker", *names],
        loc="outside right upper",
        fontsize=7,
        frameon=False,
    )
    axes.margins(0.06)
    figure.draw_without_rendering()
    spots = axes.transData.transform([(x, y) for x, y, _, _ in found])
    for number, (spot, offset) in enumerate(zip(spots, _offsets(spots), strict=True), 1):
        place = axes.transData.inverted().transform(spot)
        axes.annotate(
            str(number), place, fontsize=7, ha="center", va="center",
            xytext=offset, textcoords="offset pixels",
        )  # fmt: skip
    _save(figure, file)


def _offsets(spots: Any) -> list[tuple[float, float]]:
    """Where each number stands beside its point, in pixels: as far from all else as it can be."""
    taken = [(float(x), float(y)) for x, y in spots]
    chosen = []
    for x, y in spots:
        around = [
            (1.4 * radius * math.cos(turn), radius * math.sin(turn))
            for radius in (10, 16)
            for turn in (math.tau * n / 12 for n in range(12))
        ]

        def room(offset: tuple[float, float], x: float = x, y: float = y) -> float:
            gaps = [math.dist((x + offset[0], y + offset[1]), other) for other in taken]
            return min(min(gaps), 12) - math.hypot(*offset) / 100

        best = max(around, key=room)
        chosen.append(best)
        taken.append((float(x) + best[0], float(y) + best[1]))
    return chosen


def _figure(
    title: str, across: str, up: str, size: tuple[float, float] = (7, 4.2)
) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DinferError(
            "Plots need matplotlib; install it with: pip install 'dinfer[bench]'."
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise DinferError(f"The plot cannot be written to {str(file)!r}: {error}") from error
