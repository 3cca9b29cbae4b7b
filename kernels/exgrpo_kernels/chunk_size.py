"""How many tokens have logits at a time; no torch, for whoever plans memory."""

from __future__ import annotations

_LEAST_ELEMENTS = 1 << 23
_MOST_ROWS = 1024


def default_chunk_rows(hidden: int, columns: int) -> int:
    """Tokens of a chunk: their logits take a fifth of the space of the weight's gradient, those of 1024 tokens at most.

    Small enough not to matter beside that gradient, large enough for the products to run at full speed. A chunk of a
    small vocabulary has as many tokens as fill 32 MiB, for every chunk costs some calls.
    """
    return max(min(_MOST_ROWS, hidden // 5), _LEAST_ELEMENTS // columns, 1)
