"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]
