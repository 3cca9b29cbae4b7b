"""docs/troubleshooting.md quotes vLLM: the texts stand in the source of the vLLM that is installed."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from quoted_texts import quoted_texts

pytestmark = pytest.mark.vllm

QUOTED = [quote for quote in quoted_texts() if quote.how == "vllm"]


def literals(path: Path) -> Iterator[str]:
    """The texts of a module, with `{}` for what is put into them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("quote", QUOTED, ids=lambda quote: quote.text.strip()[:40])
def test_a_text_of_vllm_stands_in_its_source(quote):
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    begins = " ".join(quote.text.split()[:4]).split("...")[0].strip()
    sources = [path for path in (Path(found.origin).parent / "v1").rglob("*.py") if begins in path.read_text("utf-8")]
    texts = [" ".join(text.split()) for path in sources for text in literals(path)]
    assert [text for text in texts if quote.pattern().search(text)]
