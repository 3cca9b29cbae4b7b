"""How many tokens have logits at a time; no torch, for whoever plans memory."""

from __future__ import annotations

# Logits of a chunk: at least this many (16 MiB in float32), so that few tokens of a small vocabulary are one chunk.
_LEAST_ELEMENTS = 1 << 22
_MOST_ROWS = 1024


def default_chunk_rows(hidden: int, columns: int) -> int:
    """Tokens of a chunk: their logits take half the space of the weight's gradient, or 16 MiB if that is more.

    Small enough not to matter beside that gradient, large enough for the products to run at full speed. At most 1024.
    """
    return min(_MOST_ROWS, max(1, hidden // 2, _LEAST_ELEMENTS // max(1, columns)))
