"""Where weights lie while they are handed to an engine: all in which CPU and GPU, one process and two, differ.

The sender fills `Buffer.tensor`; the receiver opens `Buffer.handle()`. In one process both are the same memory.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Protocol

import torch
from torch import Tensor


class Buffer(Protocol):
    """A fixed number of bytes that sender and receiver see."""

    tensor: Tensor
    """uint8 [bytes]"""

    def handle(self) -> dict[str, Any]:
        """What `open_buffer` needs on the other side."""

    def close(self) -> None:
        """Give the memory back."""


def make_buffer(num_bytes: int, device: torch.device, *, separate_process: bool) -> Buffer:
    """The buffer for an engine on `device`, in this process or in one beside it."""
    if not separate_process:
        return LocalBuffer(num_bytes, device)
    return SharedFileBuffer(num_bytes) if device.type == "cpu" else CudaHandleBuffer(num_bytes, device)


def open_buffer(handle: dict[str, Any]) -> Tensor:
    """The sender's uint8 tensor, from its handle."""
    if "tensor" in handle:
        return handle["tensor"]
    if "file" in handle:
        return torch.from_file(handle["file"], shared=True, size=handle["num_bytes"], dtype=torch.uint8)
    rebuild, arguments = handle["cuda"]
    return rebuild(*arguments)


class LocalBuffer:
    """Memory of this process, on any device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def handle(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)


class SharedFileBuffer:
    """A file in shared memory that two processes of one machine map."""

    def __init__(self, num_bytes: int) -> None:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, self._path = tempfile.mkstemp(prefix="exgrpo_weights_", dir=folder)
        try:
            # Reserves the memory now: a write into a full shared-memory file system kills the process instead.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.unlink(self._path)
            raise
        finally:
            os.close(descriptor)
        self.tensor = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    def handle(self) -> dict[str, Any]:
        return {"file": self._path, "num_bytes": len(self.tensor)}

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if os.path.exists(self._path):
            os.unlink(self._path)


class CudaHandleBuffer:
    """Memory of a GPU that a second process of the same machine opens by its CUDA IPC handle. Not run yet: no GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def handle(self) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415

        torch.cuda.synchronize(self.tensor.device)
        return {"cuda": reduce_tensor(self.tensor)}

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
