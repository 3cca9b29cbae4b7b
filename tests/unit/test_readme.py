"""README.md leads to every page of the documentation, once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_table_names_every_page_once():
    first_cells = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| [")]
    named = [page for cell in first_cells for page in re.findall(r"\]\(docs/(\w+\.md)\)", cell)]
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_file_that_it_links_to_is_there():
    linked = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", TEXT)
    assert len(linked) > 25
    assert [path for path in linked if not (ROOT / path).exists()] == []
