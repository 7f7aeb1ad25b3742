"""Plots of a benchmark's results (matplotlib, extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path

from dinfer.errors import DinferError


def lines(
    file: Path,
    series: dict[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    across: str,
    up: str,
    logarithmic: bool = False,
) -> None:
    """Writes named lines (x values, y values) to an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DinferError(
            "Plots need matplotlib; install it with: pip install 'dinfer[bench]'."
        ) from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in series.items():
        axes.plot(x, y, marker="o", label=name)
    axes.set(title=title, xlabel=across, ylabel=up)
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise DinferError(f"The plot cannot be written to {str(file)!r}: {error}") from error
