"""Tensors of a Megatron checkpoint put together from the pieces that its table of contents lists."""

from __future__ import annotations

import torch
from torch import Tensor

from exgrpo_conversion._mapped import as_values
from exgrpo_conversion._torch_archive import TENSOR_NAMES, TorchArchive
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.safe_metadata import StoredChunk, StoredTensor


def read_tensor(tensor: StoredTensor, layer: int | None = None) -> Tensor:
    """A whole tensor, or one layer of a tensor that stacks them.

    What lies in one piece of the file is mapped, else the pieces are copied together, each of them mapped meanwhile.

    Raises:
        ModelFolderError: a piece is damaged, or holds another dtype or shape than the table of contents says.
    """
    first, shape = (0, tensor.shape) if layer is None else (layer, (1, *tensor.shape[1:]))
    end = first + shape[0] if shape else 1
    chunks = [it for it in tensor.chunks if not shape or (it.offsets[0] < end and first < it.offsets[0] + it.sizes[0])]
    if len(chunks) == 1 and chunks[0].sizes == shape:
        whole = _bytes_of(chunks[0], tensor.dtype, whole=True)
        return as_values(whole.contiguous().flatten(), tensor.dtype, shape if layer is None else shape[1:])
    out = torch.empty(shape, dtype=tensor.dtype)
    place = out.unsqueeze(-1).view(torch.uint8)
    for chunk in chunks:
        found, offsets = _bytes_of(chunk, tensor.dtype, whole=layer is None or chunk.sizes[0] == 1), list(chunk.offsets)
        if layer is not None:
            found, offsets[0] = found.narrow(0, layer - chunk.offsets[0], 1), 0
        target = place
        for dim, offset in enumerate(offsets):
            target = target.narrow(dim, offset, found.shape[dim])
        target.copy_(found)
    return out if layer is None else out[0]


def _bytes_of(chunk: StoredChunk, dtype: torch.dtype, *, whole: bool) -> Tensor:
    archive = TorchArchive(chunk.file, chunk.start, chunk.length)
    saved = archive.tensor(archive.content(TENSOR_NAMES))
    if (saved.dtype, saved.shape) != (dtype, chunk.sizes):
        raise ModelFolderError(
            f"{archive.where} hold a {saved.dtype} tensor {saved.shape}, promised is {dtype} {chunk.sizes}"
        )
    return saved.map_bytes(whole=whole)
