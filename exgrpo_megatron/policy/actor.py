"""The trained policy: a Megatron-Core model that scores sequences, takes optimiser steps, is saved and exported."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from exgrpo_kernels import fused
from exgrpo_kernels.fused import OutputHead
from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.importance import replayed_answers
from exgrpo_megatron.comm import Communicator, together
from exgrpo_megatron.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from exgrpo_megatron.policy import backend, checkpoint, layers, schedule
from exgrpo_megatron.policy.batch import BatchRule, MicroBatch, in_input_order, loss_inputs, micro_batches, pairs
from exgrpo_megatron.policy.head import output_head
from exgrpo_megatron.policy.model import ResponseModel, load_model
from exgrpo_megatron.policy.optimizer import apply_gradients, build_optimizer, build_scheduler
from exgrpo_megatron.policy.schedule import Outputs
from exgrpo_megatron.policy.weights import WeightExport
from exgrpo_megatron.types import LossTerms, ScoredSequence, TokenIds, TrainSequence, UpdateResult


class _LossKernel(TypedDict):
    """How `exgrpo_kernels.fused` is to compute."""

    form: fused.Form
    chunk_size: int | None


class MegatronActor:
    """The policy on this rank. `initialize` must have made the process groups.

    `version` counts the optimiser steps that were applied; it numbers the weights.
    """

    def __init__(
        self,
        model_dir: Path,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        *,
        total_updates: int,
        comm: Communicator,
    ) -> None:
        """Load the Hugging Face model in `model_dir`. `total_updates` is the length of the run in optimiser steps.

        Raises:
            CheckpointError: `model_dir` cannot be loaded.
        """
        backend.install()
        self.comm = comm
        self.version = 0
        self._policy = policy
        self._loss_kernel: _LossKernel = {"form": policy.loss_kernel, "chunk_size": policy.logprob_chunk_size}
        self._gpt, self.architecture = load_model(model_dir, policy)
        self._model = _data_parallel(self._gpt, policy)
        self._weights = WeightExport(self._gpt, self.architecture)
        self._optimizer = build_optimizer(self._model, policy, optimizer)
        self._scheduler = build_scheduler(self._optimizer, optimizer, scheduler, total_updates)

    @property
    def device(self) -> torch.device:
        return next(self._gpt[0].parameters()).device

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt and its response, at most."""
        return min(self._policy.max_total_sequence_length, self.architecture.max_positions)

    def score(self, sequences: Sequence[tuple[TokenIds, TokenIds]], temperature: float) -> list[ScoredSequence]:
        """Log-prob and entropy of every response token under softmax(logits / temperature), in the order given.

        `sequences` are this data-parallel rank's (prompt, response) pairs, possibly none. Collective over all
        processes, though no data-parallel rank waits for another's sequences.
        """
        batches = self._micro_batches(sequences, train=False)
        with torch.no_grad():
            outputs = schedule.run(
                self._model, batches, partial(self._scored, temperature=temperature), forward_only=True
            )
        logprobs = in_input_order(batches, [output["logprobs"] for output in outputs])
        entropies = in_input_order(batches, [output["entropies"] for output in outputs])
        return [ScoredSequence(*arrays) for arrays in zip(logprobs, entropies, strict=True)]

    def without_fp8(self) -> AbstractContextManager[None]:
        """Inside, `score` computes in the precision of the weights."""
        return layers.without_fp8(self._gpt)

    def update(
        self,
        sequences: Sequence[TrainSequence],
        objective: Objective,
        *,
        temperature: float,
        micro_batch_entropy_coeff: float = 0.0,
        lr_multiplier: float = 1.0,
        apply: bool = True,
    ) -> UpdateResult:
        """Take one optimiser step on the sequences of all data-parallel ranks together; collective over all processes.

        Minimises the sum over all response tokens of `policy_weight * term - entropy_weight * entropy`: nothing is
        averaged, so the result depends neither on micro-batches nor on ranks. `sequences` is this rank's share and may
        be empty. `micro_batch_entropy_coeff` adds that coefficient times the mean entropy of each micro-batch over the
        number of data-parallel ranks, as the released code does; the result then does depend on both. `lr_multiplier`
        multiplies the schedule's learning rate in this step. Without `apply` loss and gradient are computed and the
        step is skipped, whatever they are.
        """
        batches = self._micro_batches(list(pairs(sequences)), train=True)
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

        def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Outputs]:
            self.comm.places.advance()
            inputs = loss_inputs(batch, sequences, mean_entropy_coeff=micro_batch_entropy_coeff / self.comm.size)
            head = self._head(temperature)
            result = fused.token_loss(hidden.squeeze(0), head, inputs, objective, **self._loss_kernel)
            outputs = {
                "loss": result.loss.detach().clone(),
                "log_ratio": result.log_ratio,
                "entropy": result.entropies,
                "clipped": result.clipped,
            }
            return result.loss, torch.tensor(len(inputs.targets), dtype=torch.int, device=hidden.device), outputs

        outputs = schedule.run(self._model, batches, loss, forward_only=False)
        total_loss = self._global_sum(sum((float(output["loss"]) for output in outputs), 0.0))
        step = apply_gradients(
            self._optimizer,
            self._scheduler,
            loss=total_loss,
            max_norm=self._policy.max_grad_norm,
            skip_above=self._policy.skip_grad_norm_above if apply else -math.inf,  # also a norm of 0 is above that
            lr_multiplier=lr_multiplier,
        )
        self.version += not step.skipped
        terms = _loss_terms(sequences, batches, outputs)
        return UpdateResult(
            loss=total_loss,
            grad_norm=step.grad_norm,
            skipped=step.skipped,
            learning_rate=step.learning_rate,
            num_positions=sum(batch.num_positions for batch in batches),
            num_padding=sum(batch.num_padding for batch in batches),
            terms=terms,
            replayed=replayed_answers(sequences, terms),
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, as copies on `device`, one parameter at a time.

        The output layer of a tied model is left out, and so are padded vocabulary rows. Every process gets every
        weight; collective, so each must read to the end.
        """
        schedule.receive_weights(self._model)
        for weight in self._weights:
            self.comm.places.advance()
            yield weight

    def weight_manifest(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight that `export_weights` gives; nothing is exchanged."""
        return self._weights.manifest()

    def other_tensors(self, folder: Path) -> list[str]:
        """The tensors of a Hugging Face folder that are not the policy's, as far as this rank has them (its part of the
        layers and matrices); nothing is exchanged."""
        return self._weights.other_tensors(folder, self.comm.places.advance)

    def save(self, folder: Path) -> None:
        """Write everything needed to resume into `folder`, which must be empty or absent; collective over all ranks.

        Raises:
            CheckpointError: on every rank, where the folder holds something, or one cannot write.
        """
        saving = self.begin_save(folder, snapshot=False)
        with together(self.comm):
            saving.write()
        saving.finish()

    def begin_save(self, folder: Path, *, snapshot: bool) -> checkpoint.PolicySave:
        """`save` in steps: this one is collective; then each rank writes, in any thread; then all finish it.

        `snapshot`: what is written is what is now, whatever is trained meanwhile; it is copied to host memory.

        Raises:
            CheckpointError: the folder holds something, or cannot be made.
        """
        schedule.receive_weights(self._model)
        return checkpoint.begin_save(folder, self._checkpointed(), snapshot=snapshot)

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote; collective over all ranks. Learning rate, decay and betas stay the recipe's.

        Raises:
            CheckpointError: the folder is no complete checkpoint, or one of another architecture or precision.
        """
        self.version = checkpoint.load(folder, self._checkpointed())

    def begin_with(self, folder: Path) -> None:
        """Take over the weights of what another run saved, as the beginning of a new one; collective over all ranks.

        Raises:
            CheckpointError: as `load`.
        """
        checkpoint.load_model(folder, self._checkpointed())

    def _checkpointed(self) -> checkpoint.Checkpointed:
        return checkpoint.Checkpointed(
            architecture=self.architecture,
            precision=self._policy.precision,
            version=self.version,
            chunks=self._gpt,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
        )

    def _micro_batches(self, sequences: Sequence[tuple[TokenIds, TokenIds]], *, train: bool) -> list[MicroBatch]:
        rule = BatchRule.of(self._policy, train=train, context_rank=mpu.get_context_parallel_rank())
        return micro_batches(sequences, rule, self.device)

    def _scored(self, batch: MicroBatch, hidden: Tensor, *, temperature: float, non_loss_data: bool) -> Outputs:
        del non_loss_data  # Megatron's schedule passes it to whoever collects something else than a loss
        self.comm.places.advance()
        head = self._head(temperature)
        logprobs, entropies = fused.score(hidden.squeeze(0), head, batch.targets, **self._loss_kernel)
        return {"logprobs": logprobs, "entropies": entropies}

    def _head(self, temperature: float) -> OutputHead:
        """The output layer; only on a last stage."""
        return output_head(self._gpt[-1], self.architecture.vocab_size, temperature)

    def _global_sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=mpu.get_data_parallel_group())
        return float(total)


def _data_parallel(chunks: list[ResponseModel], policy: PolicyConfig) -> list[DistributedDataParallel]:
    """Each chunk with the sum of its gradients over data-parallel ranks, in float32 whatever the weights are in."""
    config, layout = chunks[0].config, policy.megatron_cfg
    overlap = layout.distributed_data_parallel_config
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=layout.optimizer.use_distributed_optimizer,
                overlap_grad_reduce=overlap.overlap_grad_reduce,
                overlap_param_gather=overlap.overlap_param_gather,
                bucket_size=overlap.bucket_size,
            ),
            Float16Module(config, chunk) if policy.precision == "bfloat16" else chunk,
            disable_bucketing=number > 0,  # the sums of later chunks have the passes of the others to hide behind
        )
        for number, chunk in enumerate(chunks)
    ]
    if overlap.overlap_grad_reduce:  # gradients are summed over ranks in the last micro-batch only
        functions = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


def _loss_terms(
    sequences: Sequence[TrainSequence], batches: Sequence[MicroBatch], outputs: Sequence[Outputs]
) -> LossTerms:
    """The per-token report of an update, in the order of `sequences`."""
    lengths = [len(sequence.response_ids) for sequence in sequences]

    def ordered(name: str, dtype: type[np.generic]) -> np.ndarray:
        arrays = in_input_order(batches, [output[name] for output in outputs])
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype)

    return LossTerms(
        log_ratio=ordered("log_ratio", np.float32),
        entropy=ordered("entropy", np.float32),
        clipped=ordered("clipped", np.bool_),
        advantage=np.repeat(np.array([sequence.advantage for sequence in sequences], np.float32), lengths),
        replayed=np.repeat(np.array([sequence.replayed for sequence in sequences], np.bool_), lengths),
    )
