"""What is kept of a bad step."""

from __future__ import annotations

from exgrpo_megatron.config.section import PositiveFloat, PositiveInt, Section, key


class DebugConfig(Section):
    """A step is bad if it raises, skips an optimiser step, has a loss, norm or log-ratio that is not finite, or is
    beyond one of these limits."""

    enabled: bool = key(False, "keep the batch of bad steps in <logger.log_dir>/debug (`exgrpo train --debug`)")
    max_abs_loss: PositiveFloat | None = key(None, "largest size of an optimiser step's loss; null: no limit")
    max_grad_norm: PositiveFloat | None = key(
        None, "largest norm of a gradient before clipping; null: policy.skip_grad_norm_above alone"
    )
    max_ratio: PositiveFloat | None = key(1e4, "largest ratio w of a response token; null: no limit")
    max_dumps: PositiveInt = key(5, "steps kept by one start of the run; further ones are counted", "steps")
    weights: bool = key(False, "keep the weights as they are after the step too, as a Hugging Face folder")
