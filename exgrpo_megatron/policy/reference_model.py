"""The model of a run's checkpoint as Megatron-Core loads it, on the CPU: what an export is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.hf_folder import HFReader
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy import backend
from exgrpo_megatron.policy.checkpoint import load_weights, reading, sharded_weights
from exgrpo_megatron.policy.model import build_chunks, tensors_other_than
from exgrpo_megatron.types import TokenIds

_MARGIN = 1.3
"""Beside the weights: activations, logits, and the tensor that is being read."""


class ReferenceModel:
    """A checkpoint's model in float32, whole in this process, whose group of one must have been made.

    Its weights come by Megatron's own loading, not by the weight mapping.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or memory does not suffice.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        check_memory(arch)
        backend.install()
        self._arch = arch
        (self._model,) = build_chunks(arch, PolicyConfig(model_name=str(folder), precision="float32"))
        with reading(folder):
            loaded = dist_checkpointing.load({"model0": sharded_weights(self._model)}, str(folder))
        load_weights(self._model, loaded["model0"])
        self._model.eval()

    @torch.no_grad()
    def round(self, dtype: torch.dtype) -> None:
        """Give the weights the values they have as `dtype`."""
        for parameter in self._model.parameters():
            parameter.copy_(parameter.to(dtype))

    @torch.no_grad()
    def logprobs(self, prompt: TokenIds, response: TokenIds) -> Tensor:
        """Log-prob of every token at each response position, [response tokens, vocabulary]."""
        tokens = torch.from_numpy(np.concatenate([prompt, response])[:-1]).long()[None]
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, len(prompt) - 1 :] = True
        hidden = self._model(tokens, None, None, loss_mask=mask).squeeze(0)
        logits = hidden @ self._model.output_weight.T
        return logits[:, : self._arch.vocab_size].float().log_softmax(-1)

    def other_tensors(self, folder: Path, dtype: torch.dtype | None) -> list[str]:
        """The tensors of a Hugging Face folder that are not this model's as `dtype` (None: that of the folder)."""
        with HFReader(folder) as reader:
            return tensors_other_than([self._model], self._arch, reader, dtype)


def check_memory(arch: Architecture) -> None:
    """Raise CheckpointError where a float32 copy of the model does not fit into the memory that is free."""
    needed = _MARGIN * 4 * sum(int(np.prod(shape)) for shape in manifest(arch).values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"comparing log-probs needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: use "
            "--verify tensors, which compares the tensors alone, or a larger machine"
        )
