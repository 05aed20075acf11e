"""The plot of `outrider train evaluate`: acceptance length over draft length, one panel per temperature and domain.

Needs matplotlib, which only the `train` extra installs. Not here: measuring (evaluate_heads.py).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

from outrider.training.evaluate_heads import Figures

_PANEL_INCHES = (3.2, 2.6)


def write_plot(figures: Figures, path: Path) -> None:
    """Writes an SVG. Uses Figure without pyplot, which would choose a window system and keep global state."""
    temperatures = sorted({cell.temperature for cell in figures.cells})
    domains = list(dict.fromkeys(cell.domain for cell in figures.cells))
    methods = list(dict.fromkeys(cell.method for cell in figures.cells))
    size = (_PANEL_INCHES[0] * len(domains), _PANEL_INCHES[1] * len(temperatures))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(temperatures), len(domains), squeeze=False, sharex=True, sharey=True)
    for row, temperature in enumerate(temperatures):
        for column, domain in enumerate(domains):
            panel = axes[row][column]
            panel.set_title(f"{domain}, temperature {temperature:g}", fontsize=9)
            for (place, method), is_tree in product(enumerate(methods), (False, True)):
                wanted = (method, temperature, domain, is_tree)
                points = sorted(
                    (cell.draft_len, cell.mean_acceptance_length)
                    for cell in figures.cells
                    if (cell.method, cell.temperature, cell.domain, cell.token_tree) == wanted
                )
                style = {"color": f"C{place}", "linestyle": "--" if is_tree else "-", "marker": "^" if is_tree else "o"}
                label = f"{method}, tree" if is_tree else method
                if points:
                    panel.plot([x for x, _ in points], [y for _, y in points], markersize=3, label=label, **style)
            panel.grid(alpha=0.3)
            panel.set_ylim(bottom=1.0)
    axes[0][0].legend(fontsize=8)
    figure.supxlabel("draft tokens per step", fontsize=9)
    figure.supylabel("tokens per step of the target", fontsize=9)
    # No date, so that the same figures give the same file.
    figure.savefig(path, format="svg", metadata={"Date": None})
