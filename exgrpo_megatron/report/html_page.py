"""A run as one HTML file that opens from disk: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from exgrpo_megatron.files import replace_text
from exgrpo_megatron.report.html_data import PageData, number_rows, page_data, recipe_rows, variant_rows
from exgrpo_megatron.report.run_data import load_run

PAGE_FILE = "report.html"
MAX_ANSWER_TEXTS = 5000
"""Texts of replayed answers in a page, unless another number is asked for."""
_SCRIPTS = ("charts.js", "dashboard.js", "questions.js", "page.js")


def write_page(
    run_dir: Path, target: Path | None = None, max_answer_texts: int = MAX_ANSWER_TEXTS
) -> tuple[Path, list[str]]:
    """Write `<run>/report.html`, or `target`, also while the run goes on; its path, and what it had to leave out.

    Raises:
        UserError: the folder holds no metrics yet, or the file cannot be written.
        DataError: metrics or history have a line that is none.
    """
    data = page_data(load_run(run_dir), run_dir, max_answer_texts)
    path = target or run_dir / PAGE_FILE
    replace_text(path, render(data))
    return path, data.notes


def render(data: PageData) -> str:
    """The whole file."""
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2")).render(
        data=data,
        facts=data.payload["run"],
        config=data.run.config,
        recipe=recipe_rows(data.run.config),
        variant=variant_rows(data.run.config),
        numbers=number_rows(data.run.config),
        style=_asset("page.css"),
        script=script,
        # The page may run this script and nothing else, and load nothing from anywhere.
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:",
        payload=safe_json(data.payload),
    )


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("exgrpo_megatron.report") / "assets" / name).read_text(encoding="utf-8")
