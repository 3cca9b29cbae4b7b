"""docs/troubleshooting.md quotes what is printed: each text is provoked, and must be what is said then.

The comment before a quoted text names how it is provoked: a function of `troubles_before`, `troubles_run` or
`troubles_after`. `...` in it stands for what differs from one time to another.
"""

import re

import pytest
import troubles_after  # noqa: F401 (the troubles are registered)
import troubles_before  # noqa: F401
import troubles_run  # noqa: F401
from quoted_texts import PAGE, quoted_texts
from troubles import TROUBLES, Place

from exgrpo_megatron.data.embedded_model import materialize

OF_OTHERS = {"torch", "vllm", "wandb"}
"""Not provoked here: torch's need CUDA; vLLM's are looked for in its source (tests/vllm/test_vllm_texts.py); W&B's
is provoked where wandb is (tests/others/test_loggers.py)."""

_SAID: dict[str, str] = {}
"""What was said, by trouble: several texts may be of one."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return materialize("embedded:chain-qwen2", folder, seed=0)


@pytest.mark.parametrize(
    "quote",
    [quote for quote in quoted_texts() if quote.how not in OF_OTHERS],
    ids=lambda quote: f"{quote.how}: {' '.join(quote.text.split())[:50]}",
)
def test_a_quoted_text_is_what_is_printed(quote, exgrpo, monkeypatch, caplog, model, request):
    if quote.how not in _SAID:
        function, fixture = TROUBLES[quote.how]
        _SAID[quote.how] = function(Place(exgrpo, request.getfixturevalue(fixture), monkeypatch, caplog, model))
    said = " ".join(_SAID[quote.how].split())
    assert quote.pattern().search(said), f"docs/troubleshooting.md, {quote.how}: what is said is\n{_SAID[quote.how]}"


def test_every_block_says_how_it_is_provoked_and_everything_provoked_is_quoted():
    blocks = re.findall(r"(?<=\n)\n(?:    .*\n)+", PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == len(quoted_texts())
    assert {quote.how for quote in quoted_texts()} == TROUBLES.keys() | OF_OTHERS


def test_a_quoted_text_says_enough_to_be_told_from_others():
    short = [quote for quote in quoted_texts() if len(quote.text.replace("...", "").strip()) < 30]
    assert short == []
