"""Bytes that a forward pass keeps for its backward pass.

Counted as in section 4 of arXiv:2205.05198 (Korthikanti et al.), for the layers used here: no dropout, RMSNorm, a gated
MLP, fewer key-value heads than query heads, and attention that never writes out its matrix. For each position and layer
on one of t tensor-parallel ranks (h hidden, q query, k key, f MLP width, d head; c bytes of the training precision):

    2 h (4 + 4 + c)       two norms, computed in float32: input, scaled input, output   (/ t with sequence parallel)
    c (q + 2 k) / t       rotated queries and keys, and values
    c (q + q) / t         attended values, and their copy in the order the output projection reads
    c (5 f) / t           gate and up (one tensor), silu(gate), up once more, and the product
    c (4 d)               sines and cosines of the rotation
    (4 + 4 + c) (q + k) / t   norms of queries and keys, where a model has them

and one float32 for each head and norm. Fused norms (Transformer Engine) keep less: this is the larger of the two.
Recomputation keeps c h a layer, and has one layer's whole sum at a time in the backward pass. Context parallel ranks
have a share of the positions each.
"""

from __future__ import annotations

from dataclasses import dataclass

from exgrpo_conversion.architecture import Architecture, padded_vocab_size
from exgrpo_kernels.chunk_size import default_chunk_rows
from exgrpo_megatron.config import LossKernel
from exgrpo_megatron.layout import VOCAB_MULTIPLE

_FLOAT32 = 4
# The reference is plain autograd: so many tensors of the size of the logits at a time, with and without gradients.
_REFERENCE_LOSS, _REFERENCE_SCORE = 6, 5
"""Bytes."""


@dataclass(frozen=True)
class TokenLayout:
    """Positions of one micro-batch on one rank, and among how many tensor-parallel ranks what is shared."""

    positions: int
    response_tokens: int
    """For how many of them the last stage has a loss."""
    tensor_parallel: int
    sequence_parallel: bool
    number_bytes: int
    """Of a number of the training precision."""
    loss_kernel: LossKernel = "auto"
    chunk_size: int | None = None
    """Tokens that have logits at a time, where the kernel works in chunks; None: the kernel chooses."""

    @property
    def hidden_share(self) -> int:
        """Ranks that share the hidden states outside attention and MLP."""
        return self.tensor_parallel if self.sequence_parallel else 1


def layer_bytes(arch: Architecture, tokens: TokenLayout) -> int:
    """Of one layer and micro-batch, nothing recomputed."""
    shared, c = tokens.tensor_parallel, tokens.number_bytes
    queries, keys = arch.num_heads * arch.head_dim // shared, arch.num_kv_heads * arch.head_dim // shared
    norms = 2 * arch.hidden_size * (2 * _FLOAT32 + c) // tokens.hidden_share
    attention = c * ((queries + 2 * keys) + 2 * queries + 4 * arch.head_dim)
    head_norms = (2 * _FLOAT32 + c) * (queries + keys) if arch.qk_norm else 0
    mlp = c * 5 * arch.ffn_size // shared
    statistics = _FLOAT32 * (arch.num_heads // shared + 2)
    return tokens.positions * (norms + attention + head_norms + mlp + statistics)


def boundary_bytes(arch: Architecture, tokens: TokenLayout) -> int:
    """Of the hidden states between two layers: what recomputation keeps of a layer, and what a stage passes on."""
    return tokens.positions * arch.hidden_size * tokens.number_bytes // tokens.hidden_share


def head_bytes(arch: Architecture, tokens: TokenLayout) -> int:
    """Of the last stage beside its layers and the loss: the final norm, and the rows chosen of its output."""
    norm = tokens.positions * arch.hidden_size * 2 * _FLOAT32 // tokens.hidden_share
    return norm + tokens.response_tokens * arch.hidden_size * tokens.number_bytes


def loss_bytes(arch: Architecture, tokens: TokenLayout, *, backward: bool) -> int:
    """Of the output layer's work on a micro-batch: logits, and in training all gradients that are made beside them.

    Logits are float32, of some tokens at a time or of all, and their gradient takes their place, with a copy of it in
    the training precision for the products. The gradients of hidden states and weight (float32) are made with them.
    """
    columns = padded_vocab_size(arch.vocab_size, VOCAB_MULTIPLE, tokens.tensor_parallel) // tokens.tensor_parallel
    lower = tokens.number_bytes if tokens.number_bytes < _FLOAT32 else 0
    rows = _tokens_at_a_time(tokens, arch.hidden_size, columns)
    if not backward:
        return rows * columns * _FLOAT32 * (_REFERENCE_SCORE if tokens.loss_kernel == "reference" else 1)
    weight_gradient = columns * arch.hidden_size * _FLOAT32
    hidden_gradient = tokens.response_tokens * arch.hidden_size * tokens.number_bytes
    gradients = weight_gradient + hidden_gradient
    if tokens.loss_kernel == "reference":  # hidden states and weight are multiplied in float32
        copies = (columns + tokens.response_tokens) * arch.hidden_size * _FLOAT32 if lower else 0
        return _REFERENCE_LOSS * rows * columns * _FLOAT32 + copies + gradients
    return rows * columns * (_FLOAT32 + lower) + gradients


def _tokens_at_a_time(tokens: TokenLayout, hidden: int, columns: int) -> int:
    if tokens.loss_kernel in ("reference", "logits"):
        return tokens.response_tokens
    return min(tokens.response_tokens, tokens.chunk_size or default_chunk_rows(hidden, columns))
