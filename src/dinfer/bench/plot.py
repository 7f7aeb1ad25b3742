"""Plots of results (matplotlib, extra `bench`)."""

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
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, file)


def points(
    file: Path, found: Sequence[tuple[float, float, str, bool]], title: str, across: str, up: str
) -> None:
    """Writes named points (x, y, name, whether on the front) to an image file; the front is joined
    by a line.
    """
    figure, axes = _figure(title, across, up)
    best = sorted((x, y) for x, y, _, front in found if front)
    axes.plot(*zip(*best, strict=True), color="tab:red", zorder=1)
    for x, y, name, front in found:
        axes.scatter(x, y, color="tab:red" if front else "tab:gray", zorder=2)
        axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    _save(figure, file)


def _figure(title: str, across: str, up: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DinferError(
            "Plots need matplotlib; install it with: pip install 'dinfer[bench]'."
        ) from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise DinferError(f"The plot cannot be written to {str(file)!r}: {error}") from error
