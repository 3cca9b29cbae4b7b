"""Token entropy of right against wrong answers, by how often their question is answered rightly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from exgrpo_megatron.data.pass_rates import BANDS, Band, PassRate
from exgrpo_megatron.report.dashboard import STYLE
from exgrpo_megatron.report.pictures import save_picture
from exgrpo_megatron.report.seeds import Interval, mean_interval, paired_difference

ALWAYS, NEVER = "always right", "never right"
COLORS = {"right": "#2b8a3e", "wrong": "#d9480f"}


@dataclass(frozen=True)
class BandEntropy:
    """One band. An answer counts by the mean entropy of its tokens (nats), a question by the mean of its answers; the
    intervals (95 %, t) are over questions, because the answers of one question are alike."""

    name: str
    pass_rates: str
    num_questions: int
    num_right: int
    """Answers."""
    num_wrong: int
    right: Interval | None
    wrong: Interval | None
    wrong_minus_right: Interval | None
    """Within the questions that have both: what is left when the questions' own difficulty is taken out."""


@dataclass(frozen=True)
class EntropyReport:
    """Bands from easy to hard. Those of `data.pass_rates.BANDS` share the questions of exactly 75 %."""

    bands: tuple[BandEntropy, ...]

    def as_json(self) -> list[dict[str, object]]:
        """For the file of an evaluation; an interval has `mean`, `half_width` (null for one question), `num_seeds` (of
        questions)."""
        return [{name: _finite(value) for name, value in asdict(band).items()} for band in self.bands]

    def table(self) -> Table:
        """For a terminal."""
        table = Table(title="mean token entropy (nats), by pass rate", title_justify="left", box=None, pad_edge=False)
        for heading in ("band", "questions", "right", "wrong", "right answers", "wrong answers", "wrong - right"):
            table.add_column(heading, justify="left" if heading == "band" else "right")
        for band in self.bands:
            shown = [_shown(value) for value in (band.right, band.wrong, band.wrong_minus_right)]
            counts = map(str, (band.num_questions, band.num_right, band.num_wrong))
            table.add_row(f"{band.name} {band.pass_rates}", *counts, *shown)
        return table


def entropy_report(answers: Sequence[Mapping[str, object]], rates: Sequence[PassRate]) -> EntropyReport:
    """From graded answers with `question_id`, `reward` and `mean_entropy`, and the pass rates of their questions."""
    of_question = {rate.question_id: rate.value for rate in rates}
    bands = [(ALWAYS, Band(1.0, 1.0)), *((str(name), band) for name, band in BANDS.items()), (NEVER, Band(0.0, 0.0))]
    return EntropyReport(tuple(_band(name, band, answers, of_question) for name, band in bands))


def draw_entropy(report: EntropyReport, path: Path) -> None:
    """The report as a picture: one pair of points a band, with intervals."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.subplots()
        for offset, (name, color) in zip((-0.08, 0.08), COLORS.items(), strict=True):
            found = [band.right if name == "right" else band.wrong for band in report.bands]
            points = [(place, interval) for place, interval in enumerate(found) if interval is not None]
            ax.errorbar(
                [place + offset for place, _ in points],
                [interval.mean for _, interval in points],
                yerr=[0.0 if interval.num_seeds == 1 else interval.half_width for _, interval in points],
                fmt="o", capsize=3, color=color, label=f"{name} answers",
            )  # fmt: skip
        ax.set_xticks(range(len(report.bands)), [f"{band.name}\n{band.pass_rates}" for band in report.bands])
        ax.set_ylabel("mean token entropy (nats)")
        ax.set_xlabel("pass rate of the question")
        ax.set_ylim(bottom=0.0)
        ax.legend()
        save_picture(figure, path, 130)


def _band(name: str, band: Band, answers: Sequence[Mapping[str, object]], rates: Mapping[str, float]) -> BandEntropy:
    chosen = {question for question, rate in rates.items() if rate in band}
    rows = [row for row in answers if row["question_id"] in chosen]
    right = [row for row in rows if row["status"] == "correct"]
    wrong = [row for row in rows if row["status"] != "correct"]
    by_question = [_question_means(part) for part in (right, wrong)]
    means = [mean_interval(list(values.values())) if values else None for values in by_question]
    return BandEntropy(
        name=name,
        pass_rates=f"{band.low:.0%}" if band.low == band.high else band.describe(),
        num_questions=len(chosen),
        num_right=len(right),
        num_wrong=len(wrong),
        right=means[0],
        wrong=means[1],
        wrong_minus_right=paired_difference(by_question[1], by_question[0]),
    )


def _question_means(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(str(row["question_id"]), []).append(float(row["mean_entropy"]))  # type: ignore[arg-type]
    return {name: sum(entropies) / len(entropies) for name, entropies in values.items()}


def _finite(value: object) -> object:
    """JSON has no NaN: the half width of one question's interval is null there."""
    if not isinstance(value, dict):
        return value
    return {name: None if isinstance(part, float) and math.isnan(part) else part for name, part in value.items()}


def _shown(interval: Interval | None) -> str:
    return "-" if interval is None else interval.describe(3)
