"""The dashboard of a run: nine pictures in one PNG."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from exgrpo_megatron.report.panels import INK, PANELS
from exgrpo_megatron.report.pictures import save_picture
from exgrpo_megatron.report.run_data import RunData, load_run

SIZE_INCHES, DOTS_PER_INCH = (14.0, 10.0), 100

STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.22,
    "axes.axisbelow": True,
}


def write_dashboard(run_dir: Path) -> Path:
    """Draw `<run>/dashboard.png` (1400 x 1000) from the run's metrics, also while it is running, and return its path.

    Raises UserError where the folder holds no metrics yet.
    """
    figure = draw_dashboard(load_run(run_dir))
    path = run_dir / "dashboard.png"
    save_picture(figure, path, DOTS_PER_INCH)
    return path


def draw_dashboard(run: RunData) -> Figure:
    """The nine pictures; a dotted line in each marks the step where replay starts."""
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        FigureCanvasAgg(figure)
        panels: list[Axes] = list(figure.subplots(3, 3).flat)
        for ax, draw in zip(panels, PANELS, strict=True):
            draw(ax, run)
            _share_steps(ax, run)
        for ax in panels[6:]:
            ax.set_xlabel("step")
        figure.suptitle(_title(run), fontsize=12, x=0.01, ha="left")
    return figure


def _share_steps(ax: Axes, run: RunData) -> None:
    """The same steps in every picture, and the line where replay starts."""
    first, last = run.records[0]["step"], run.records[-1]["step"]
    ax.set_xlim(first - 0.5, last + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    if run.replay_start is not None:
        ax.axvline(run.replay_start, color=INK, lw=1.0, ls=":")


def _title(run: RunData) -> str:
    done, total = int(run.records[-1]["step"]), run.config.grpo.max_num_steps
    parts = [run.name, _method(run)]
    parts.append(f"{done} steps" if done >= total else f"step {done} of {total}")
    if run.replay_start is not None:
        parts.append(f"dotted line: replay starts at step {run.replay_start:.0f}")
    spent = run.series("budget/answers")
    if len(spent):
        parts.append(f"{spent.values[-1]:,.0f} answers generated")
    return "   |   ".join(parts)


def _method(run: RunData) -> str:
    experience = run.config.experience
    if not experience.enabled:
        return "on-policy, no replay"
    words = {"exgrpo": "", "replay_step": ", replay step", "both": ", with replay step"}
    return f"variant {run.config.variant}{words[experience.strategy]}"
