"""Keys and values of the rows being decoded; all rows share one column counter."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [2, rows, key-value heads, columns, head_dim], for rows decoded in step.

    Column j of a row holds the token it saw as its j-th; shorter prompts leave unused columns, which the caller masks.
    Unwritten columns are zero, never garbage: a masked NaN would still spoil the attention.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        capacity: int,
        max_columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make room for `capacity` columns, and for more as they are needed, up to `max_columns`.

        `shape` is (layers, rows, key-value heads, head_dim).
        """
        num_layers, num_rows, num_heads, head_dim = shape
        self.num_rows = num_rows
        self.num_columns = 0
        self.max_columns = max_columns
        self._capacity = min(capacity, max_columns)
        layer_shape = (2, num_rows, num_heads, self._capacity, head_dim)
        self._layers = [torch.zeros(layer_shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write_prompts(
        self,
        layer: int,
        first_row: int,
        repeats: Int[Tensor, " prompts"],
        kv: Float[Tensor, "2 prompts heads tokens dim"],
    ) -> None:
        """Write each prompt's keys and values into `repeats` consecutive rows, the first prompt's from `first_row`."""
        rows = kv.repeat_interleave(repeats, dim=1)
        self._layers[layer][:, first_row : first_row + rows.shape[1], :, : rows.shape[3]] = rows

    def open_column(self) -> None:
        """Begin the next column, with room for it; every layer then calls `append` once."""
        if self.num_columns == self._capacity:
            self._grow()
        self.num_columns += 1

    def append(self, layer: int, kv: Float[Tensor, "2 rows heads dim"]) -> Float[Tensor, "2 rows heads columns dim"]:
        """Write the open column of a layer; return all its columns so far (a view)."""
        cached = self._layers[layer][:, : self.num_rows, :, : self.num_columns]
        cached[:, :, :, -1] = kv
        return cached

    def keep_rows(self, num_rows: int, sources: Int[Tensor, " moved"], targets: Int[Tensor, " moved"]) -> None:
        """Shrink to `num_rows` rows after moving rows `sources` onto rows `targets`."""
        self.num_rows = num_rows
        if len(targets) == 0:
            return
        for cached in self._layers:
            columns = cached[:, :, :, : self.num_columns]
            columns[:, targets] = columns[:, sources]

    def _grow(self) -> None:
        """Double the columns (up to the maximum); rows no longer in use are given up."""
        assert self._capacity < self.max_columns, "more columns than the sampling call announced"
        self._capacity = min(2 * self._capacity, self.max_columns)
        for index, old in enumerate(self._layers):
            grown = old.new_zeros((2, self.num_rows, old.shape[2], self._capacity, old.shape[4]))
            grown[:, :, :, : self.num_columns] = old[:, : self.num_rows, :, : self.num_columns]
            self._layers[index] = grown
