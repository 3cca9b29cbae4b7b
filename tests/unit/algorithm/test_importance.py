"""Importance correction between engine and policy, against hand calculations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from exgrpo_megatron.algorithm.importance import corrected, correction
from exgrpo_megatron.config import LossConfig
from exgrpo_megatron.types import Trajectory

RATIOS = np.array([0.25, 1.0, 4.0, 2.0])
"""Of the policy to the engine: their product is 2, their geometric mean 2^(1/4) = 1.189."""
ENGINE = np.array([-3.0, -1.0, -2.0, -0.5], np.float32)
TRAINER = (ENGINE + np.log(RATIOS)).astype(np.float32)


def loss(**keys: Any) -> LossConfig:
    return LossConfig(use_importance_sampling_correction=True, **keys)


def limits(kind: str, low: float | None, high: float) -> dict[str, Any]:
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


@pytest.mark.parametrize(
    ("keys", "weights", "limited"),
    [
        ({}, [0.25, 1, 4, 2], [0, 0, 0, 0]),
        (limits("tis", None, 2.5), [0.25, 1, 2.5, 2], [0, 0, 1, 0]),
        (limits("tis", 0.5, 1.5), [0.5, 1, 1.5, 1.5], [1, 0, 1, 1]),
        (limits("icepop", 0.5, 2.5), [0, 1, 0, 2], [1, 0, 1, 0]),
        # The geometric mean is within the first limits and outside the second; tokens are not cut.
        (limits("seq-mask-tis", 0.9, 1.2), [0.25, 1, 4, 2], [0, 0, 0, 0]),
        (limits("seq-mask-tis", 0.9, 1.1), [0, 0, 0, 0], [1, 1, 1, 1]),
        ({"rollout_is": "sequence"}, [2, 2, 2, 2], [0, 0, 0, 0]),
        ({"rollout_is": "sequence", **limits("tis", None, 1.5)}, [1.5] * 4, [1, 1, 1, 1]),
        ({"rollout_is": "sequence", **limits("icepop", 0.5, 1.5)}, [0] * 4, [1, 1, 1, 1]),
        ({"rollout_is": "sequence", **limits("icepop", 0.5, 2.5)}, [2] * 4, [0, 0, 0, 0]),
        # log 2 = 0.693 is the clamp: 0.25 becomes 1/2, 4 becomes 2.
        ({"max_abs_log_ratio": float(np.log(2) + 1e-6)}, [0.5, 1, 2, 2], [1, 0, 1, 0]),
    ],
)
def test_weights_are_the_ratios_within_their_limits(keys: dict[str, Any], weights: list[float], limited: list[int]):
    found = corrected(TRAINER, ENGINE, loss(**keys))
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    assert found.limited.tolist() == [bool(flag) for flag in limited]
    assert found.weights.dtype == np.float32


def test_an_empty_answer_has_no_weights():
    nothing = np.zeros(0, np.float32)
    for keys in ({}, limits("seq-mask-tis", 0.9, 1.1), {"rollout_is": "sequence"}):
        assert len(corrected(nothing, nothing, loss(**keys)).weights) == 0


def test_only_new_answers_whose_log_probs_were_recomputed_are_weighed():
    ids = np.arange(4, dtype=np.int32)
    new = Trajectory(ids, TRAINER, 1.0, False, "stop", 0, ENGINE)
    replayed = Trajectory(ids, TRAINER, 1.0, True, "stop", 0)
    found = correction(new, loss())
    assert found is not None
    np.testing.assert_allclose(found.weights, RATIOS, rtol=1e-5)
    assert correction(replayed, loss()) is None
    assert correction(new, LossConfig()) is None
