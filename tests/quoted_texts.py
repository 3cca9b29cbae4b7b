"""The texts that docs/troubleshooting.md quotes."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
_BLOCK = re.compile(r"^<!-- (?P<how>[^>]*) -->\n\n(?P<text>(?:    .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Quoted:
    """An indented block of the page, and how the comment before it says that the text is provoked."""

    how: str
    text: str

    def pattern(self) -> re.Pattern[str]:
        """The text with single spaces, and with anything in place of `...`."""
        parts = [re.escape(" ".join(part.split())) for part in self.text.split("...")]
        return re.compile(r"\s*.*?\s*".join(parts), re.DOTALL)


def quoted_texts() -> list[Quoted]:
    """Every block of the page that a comment stands before, in order."""
    return [Quoted(found["how"], found["text"]) for found in _BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]
