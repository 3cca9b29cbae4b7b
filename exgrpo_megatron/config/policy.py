"""The model that is trained, and how its sequences become micro-batches."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from exgrpo_megatron.config.megatron import MegatronConfig
from exgrpo_megatron.config.rollouts import GenerationConfig
from exgrpo_megatron.config.section import Name, PositiveFloat, PositiveInt, Section, key

LossKernel = Literal["auto", "reference", "logits", "linear"]


class DynamicBatchingConfig(Section):
    """Micro-batches of as many padded rows as a number of positions admits."""

    enabled: bool = key(False, "micro-batches by train_mb_tokens and logprob_mb_tokens instead of sequences")
    train_mb_tokens: PositiveInt | None = key(
        None, "rows x longest row of a forward-backward, at most; null: policy.max_total_sequence_length", "positions"
    )
    logprob_mb_tokens: PositiveInt | None = key(
        None, "rows x longest row of a forward-only pass, at most; null: policy.max_total_sequence_length", "positions"
    )
    sequence_length_round: PositiveInt = key(
        1, "rows are padded to a multiple of this, for fewer different shapes", "positions"
    )


class SequencePackingConfig(Section):
    """Micro-batches of one row, in which sequences follow one another with no padding between them."""

    enabled: bool = key(False, "pack sequences up to train_mb_tokens and logprob_mb_tokens instead of padding them")
    train_mb_tokens: PositiveInt | None = key(
        None, "positions of a forward-backward, at most; null: policy.max_total_sequence_length", "positions"
    )
    logprob_mb_tokens: PositiveInt | None = key(
        None, "positions of a forward-only pass, at most; null: policy.max_total_sequence_length", "positions"
    )
    algorithm: Literal["first_fit_decreasing", "best_fit_decreasing"] = key(
        "first_fit_decreasing",
        "from the longest sequence down, each goes into the first pack with room, or into the one with the least room",
    )


class TokenizerConfig(Section):
    """Tokenizer and chat template."""

    name: Name | None = key(None, "folder of the tokenizer; null: policy.model_name", "path")


class PolicyConfig(Section):
    """The model that is trained."""

    model_name: Name = key(
        ...,
        "Hugging Face model folder, or a model made on the spot: embedded:chain-qwen2 (0.4M) or embedded:symbols-qwen2",
        "path",
    )
    init_from: Name | None = key(
        None,
        "checkpoint of another run of the same model (runs/NAME/checkpoints/step_N): a new run begins with its weights "
        "in place of model_name's; its experience: experience.prefill_path = that folder's experience; null: none",
        "path",
    )
    tokenizer: TokenizerConfig = key(TokenizerConfig(), "tokenizer")
    train_global_batch_size: PositiveInt = key(256, "sequences of one optimiser step", "sequences")
    train_micro_batch_size: PositiveInt | None = key(
        None,
        "sequences of one forward-backward on one rank; null: 64, or by a token budget",
        "sequences",
    )
    logprob_batch_size: PositiveInt | None = key(
        None,
        "sequences of one forward-only pass on one rank; null: 128, or by a token budget",
        "sequences",
    )
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig(), "padded micro-batches by a token budget")
    sequence_packing: SequencePackingConfig = key(SequencePackingConfig(), "packed micro-batches by a token budget")
    max_total_sequence_length: PositiveInt = key(608, "longest prompt + response", "tokens")
    precision: Literal["float32", "bfloat16"] = key("float32", "numbers of the weights in forward and backward")
    loss_kernel: LossKernel = key(
        "auto",
        "how log-probs, entropies and the loss are computed from the last hidden states. linear: the logits of some "
        "tokens at a time; logits: those of all tokens at once, their gradient in their place; reference: as written "
        "down, by autograd, to compare with; auto: linear",
    )
    logprob_chunk_size: PositiveInt | None = key(
        None,
        "how many tokens have logits at a time (loss_kernel: linear); null: as many as fill 32 MiB, or for a large "
        "vocabulary a fifth of the space of the output layer's gradient, up to 1024",
        "tokens",
    )
    max_grad_norm: PositiveFloat = key(1.0, "gradients are scaled down to this global L2 norm")
    skip_grad_norm_above: PositiveFloat = key(
        500.0, "an optimiser step whose norm is above this, or whose norm or loss is not finite, is skipped and counted"
    )
    megatron_cfg: MegatronConfig = key(MegatronConfig(), "Megatron-Core")
    generation: GenerationConfig = key(GenerationConfig(), "rollouts")

    @property
    def token_budget(self) -> DynamicBatchingConfig | SequencePackingConfig | None:
        """The section in force that counts positions; None: micro-batches are so many sequences."""
        return next((section for section in (self.dynamic_batching, self.sequence_packing) if section.enabled), None)

    @property
    def token_budget_name(self) -> str:
        """The name of that section, where one is in force."""
        return "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"

    def mb_sequences(self, *, train: bool) -> int:
        """Sequences of a micro-batch, where no token budget is in force."""
        return (self.train_micro_batch_size or 64) if train else (self.logprob_batch_size or 128)

    def mb_tokens(self, *, train: bool) -> int:
        """Positions of a micro-batch at most, padding included, of all context-parallel ranks together."""
        section = self.token_budget
        if section is None:
            return self.mb_sequences(train=train) * self.longest_row
        return (section.train_mb_tokens if train else section.logprob_mb_tokens) or self.longest_row

    @property
    def padded_to(self) -> int:
        """Positions of a row are a multiple of this."""
        return math.lcm(
            self.megatron_cfg.row_multiple,
            self.dynamic_batching.sequence_length_round if self.dynamic_batching.enabled else 1,
        )

    @property
    def longest_row(self) -> int:
        """Positions of a row with one sequence of the greatest length."""
        return -(-self.max_total_sequence_length // self.padded_to) * self.padded_to

    @model_validator(mode="after")
    def _transformer_engine_has_bfloat16(self) -> PolicyConfig:
        layout = self.megatron_cfg
        for name, asked in (
            ("fp8_cfg.enabled = true", layout.fp8_cfg.enabled),
            ("transformer_impl = transformer_engine", layout.transformer_impl == "transformer_engine"),
        ):
            if asked and self.precision == "float32":
                raise ValueError(
                    f"megatron_cfg.{name} needs policy.precision = bfloat16 (it is float32): Transformer Engine's "
                    "fused attention has no float32"
                )
        return self

    @model_validator(mode="after")
    def _one_rule_for_micro_batches(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled = true and sequence_packing.enabled = true: a micro-batch is padded or "
                "packed; leave one of them false"
            )
        name = self.token_budget_name
        for limit in ("train_micro_batch_size", "logprob_batch_size"):
            if self.token_budget is not None and getattr(self, limit) is not None:
                raise ValueError(
                    f"{limit} = {getattr(self, limit)} has no effect with {name}.enabled = true, which fills "
                    f"micro-batches up to {name}.train_mb_tokens and logprob_mb_tokens: set policy.{limit} to null, or "
                    f"{name}.enabled to false"
                )
        return self

    @model_validator(mode="after")
    def _chunks_have_a_size_where_there_are_chunks(self) -> PolicyConfig:
        if self.logprob_chunk_size is not None and self.loss_kernel in ("reference", "logits"):
            raise ValueError(
                f"logprob_chunk_size = {self.logprob_chunk_size} has no effect with loss_kernel = "
                f"'{self.loss_kernel}', which computes the logits of all tokens at once: set logprob_chunk_size to "
                "null, or loss_kernel to 'linear'"
            )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits(self) -> PolicyConfig:
        section = self.token_budget
        name = self.token_budget_name
        for limit in ("train_mb_tokens", "logprob_mb_tokens"):
            budget = getattr(section, limit, None)
            if budget is not None and budget < self.longest_row:
                padded = f", padded to a multiple of {self.padded_to}" if self.padded_to > 1 else ""
                raise ValueError(
                    f"{name}.{limit} = {budget} has no room for one sequence of max_total_sequence_length = "
                    f"{self.max_total_sequence_length} tokens ({self.longest_row} positions{padded}): raise it, or "
                    "lower that"
                )
        return self
