"""One picture of several settings: the mean over seeds of each, in the band of its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from exgrpo_megatron.report.dashboard import STYLE
from exgrpo_megatron.report.pictures import save_picture
from exgrpo_megatron.report.seeds import Curve, band

COLORS = ("#d9480f", "#1c7ed6", "#2b8a3e", "#6741d9", "#f08c00", "#0b7285", "#c2255c", "#868e96", "#212529", "#5c940d")
"""Of the settings, in their order; from the eleventh on they repeat, with another kind of line."""
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Panel:
    """One axes: a metric of every setting."""

    title: str
    curves: Mapping[str, Sequence[Curve]]
    """Setting -> its curves, one a seed; a setting without any has a place in the legend."""


def draw_bands(ax: Axes, panel: Panel) -> None:
    """Of each setting a line a seed, thin, and where all its seeds are known their mean in its band."""
    for place, (name, curves) in enumerate(panel.curves.items()):
        color, line = COLORS[place % len(COLORS)], LINES[place // len(COLORS) % len(LINES)]
        for curve in curves:
            ax.plot(curve.budget, curve.values, color=color, ls=line, lw=0.7, alpha=0.3)
        shared = band(curves)
        label = f"{name} (n={len(curves)})"
        if shared is None:
            ax.plot([], [], color=color, ls=line, lw=2, label=label)
            continue
        ax.plot(shared.budget, shared.mean, color=color, ls=line, lw=2, label=label)
        if len(curves) > 1:
            ax.fill_between(shared.budget, shared.low, shared.high, color=color, alpha=0.15, lw=0)
    ax.set_title(panel.title)


def write_bands(path: Path, panels: Sequence[Panel], x_label: str, title: str) -> Path:
    """A PNG with the panels side by side, and one legend below; returns its path.

    Raises:
        UserError: it cannot be written.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(6.0 * len(panels), 5.0), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        FigureCanvasAgg(figure)
        for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
            draw_bands(ax, panel)
            ax.set_xlabel(x_label)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        save_picture(figure, path, 110)
    return path
