"""The device code of `triton_kernels` that reads no logits, a token a thread: everything about a token but its row.

Imported where triton is.
"""

import triton
import triton.language as tl

from exgrpo_kernels.triton_rows import LN2, rescaled


@triton.jit(do_not_specialize=["num_rows"])
def loss_kernel(
    statistics,
    old_logprobs,
    advantages,
    replayed,
    policy_weights,
    entropy_weights,
    logprobs,
    entropies,
    log_ratios,
    losses,
    clipped,
    clamped,
    coefficients,
    num_ranks,
    num_rows,
    inverse_temperature,
    scale,
    clip_low,
    clip_high,
    shaping_beta,
    shaping_factor,
    max_abs_log_ratio,
    NLL: tl.constexpr,
    CLIP: tl.constexpr,
    SHAPING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens a program, one a thread: everything about a token that does not need its logits."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    maximum, log_sum, logprob, entropy = _merge(
        statistics, rows, inside, num_ranks, num_rows, inverse_temperature, scale
    )
    log_ratio = logprob - tl.load(old_logprobs + rows, mask=inside, other=0.0)
    advantage = tl.load(advantages + rows, mask=inside, other=0.0)
    weight = tl.load(policy_weights + rows, mask=inside, other=0.0)
    is_clipped = rows < 0
    is_clamped = rows < 0
    if NLL:
        term = -advantage * logprob
        slope = -advantage
    else:
        is_clamped = tl.abs(log_ratio) > max_abs_log_ratio
        ratio = tl.exp(_clamp(log_ratio, -max_abs_log_ratio, max_abs_log_ratio))
        is_replayed = tl.load(replayed + rows, mask=inside, other=0) != 0
        fresh = -advantage * ratio
        fresh_slope = fresh
        off_policy = fresh
        off_policy_slope = fresh
        bounded = -advantage * _clamp(ratio, clip_low, clip_high)
        clipped_term = tl.maximum(fresh, bounded, propagate_nan=tl.PropagateNan.ALL)
        clipped_slope = tl.where(bounded > fresh, 0.0, fresh)
        if SHAPING == "ratio":
            off_policy = -advantage * (ratio / (ratio + shaping_beta) * shaping_factor)
            off_policy_slope = off_policy * (shaping_beta / (ratio + shaping_beta))
        if SHAPING == "sqrt":
            off_policy = -advantage * tl.sqrt(ratio)
            off_policy_slope = 0.5 * off_policy
        if SHAPING == "log_prob":
            off_policy = -advantage * logprob
            off_policy_slope = -advantage
            is_clamped = is_clamped & (is_replayed == 0)
        if SHAPING == "clip":
            is_clipped = (bounded > fresh) & is_replayed
            off_policy = clipped_term
            off_policy_slope = clipped_slope
        if CLIP:
            is_clipped = is_clipped | ((bounded > fresh) & (is_replayed == 0))
            fresh_slope = clipped_slope
            fresh = clipped_term
        term = tl.where(is_replayed, off_policy, fresh)
        slope = tl.where(is_replayed, off_policy_slope, fresh_slope)
        slope = tl.where(is_clamped, 0.0, slope)
    loss = weight * term
    entropy_weight = tl.zeros([ROWS], tl.float32)
    if HAS_ENTROPY:
        entropy_weight = tl.load(entropy_weights + rows, mask=inside, other=0.0)
        loss -= entropy_weight * entropy
    # A token without weight is not looked at: an unusable row that is masked out must not make the loss NaN.
    used = (weight != 0) | (entropy_weight != 0)
    tl.store(logprobs + rows, logprob, mask=inside)
    tl.store(entropies + rows, entropy, mask=inside)
    tl.store(log_ratios + rows, log_ratio, mask=inside)
    tl.store(losses + rows, tl.where(used, loss, 0.0), mask=inside)
    tl.store(clipped + rows, is_clipped.to(tl.uint8), mask=inside)
    tl.store(clamped + rows, is_clamped.to(tl.uint8), mask=inside)
    _store_coefficients(
        coefficients, rows, num_rows, inside, maximum, log_sum, entropy,
        tl.where(used, weight * slope, 0.0), -entropy_weight, inverse_temperature,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    statistics,
    logprob_gradients,
    entropy_gradients,
    logprobs,
    entropies,
    coefficients,
    num_ranks,
    num_rows,
    inverse_temperature,
    scale,
    HAS_GRADIENTS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Log-probs and entropies of ROWS tokens, or, with upstream gradients of them, the coefficients of the logits'."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    maximum, log_sum, logprob, entropy = _merge(
        statistics, rows, inside, num_ranks, num_rows, inverse_temperature, scale
    )
    if HAS_GRADIENTS:
        entropy_gradient = tl.zeros([ROWS], tl.float32)
        if HAS_ENTROPY:
            entropy_gradient = tl.load(entropy_gradients + rows, mask=inside, other=0.0)
        logprob_gradient = tl.load(logprob_gradients + rows, mask=inside, other=0.0)
        _store_coefficients(
            coefficients, rows, num_rows, inside, maximum, log_sum, entropy,
            logprob_gradient, entropy_gradient, inverse_temperature,
        )  # fmt: skip
    else:
        tl.store(logprobs + rows, logprob, mask=inside)
        tl.store(entropies + rows, entropy, mask=inside)


@triton.jit
def _merge(statistics, rows, inside, num_ranks, num_rows, inverse_temperature, scale):
    """Maximum, log of the sum, log-prob and entropy of whole rows from the statistics of all ranks' columns."""
    maximum = tl.load(statistics + rows * 4, mask=inside, other=0.0)
    for rank in range(1, num_ranks):
        maximum = tl.maximum(maximum, tl.load(statistics + (rank * num_rows + rows) * 4, mask=inside, other=0.0))
    total = tl.zeros_like(maximum)
    moment = tl.zeros_like(maximum)
    target = tl.full(maximum.shape, float("nan"), tl.float32)
    for rank in range(0, num_ranks):
        part = statistics + (rank * num_rows + rows) * 4
        part_sum = tl.load(part + 1, mask=inside, other=1.0)
        part_moment = tl.load(part + 2, mask=inside, other=0.0) / LN2
        difference = tl.load(part, mask=inside, other=0.0) - maximum
        part_sum, part_moment = rescaled(part_sum, part_moment, difference, scale)
        total += part_sum
        moment += part_moment
        own = tl.load(part + 3, mask=inside, other=0.0)
        target = tl.where(own == own, own, target)
    log_sum = tl.log(total)
    # Not t - (m + log s): a large maximum would take the digits of log s with it.
    logprob = (target - maximum) * inverse_temperature - log_sum
    return maximum, log_sum, logprob, log_sum - moment * LN2 / total


@triton.jit
def _store_coefficients(
    coefficients,
    rows,
    num_rows,
    inside,
    maximum,
    log_sum,
    entropy,
    logprob_gradient,
    entropy_gradient,
    inverse_temperature,
):
    """The five numbers of each row that `gradient_kernel` takes, from d(loss)/d(logprob) and d(loss)/d(entropy).

    d(logprob)/dz_j = [j = target] - p_j and d(entropy)/dz_j = -p_j (log p_j + H), with z = logits / temperature.
    """
    logprob_gradient *= inverse_temperature
    entropy_gradient *= inverse_temperature
    base = -(logprob_gradient + entropy_gradient * entropy)
    unused = (logprob_gradient == 0) & (entropy_gradient == 0)
    coefficients += rows
    tl.store(coefficients, maximum, mask=inside)
    tl.store(coefficients + num_rows, log_sum / LN2, mask=inside)
    tl.store(coefficients + 2 * num_rows, tl.where(unused, 0.0, base), mask=inside)
    tl.store(coefficients + 3 * num_rows, -entropy_gradient * LN2, mask=inside)
    tl.store(coefficients + 4 * num_rows, logprob_gradient, mask=inside)


@triton.jit
def _clamp(value, low, high):
    """`low`..`high`; NaN stays NaN, as in torch."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)
