"""Experience replay for a training loop of your own: the parts the trainer is made of, without Megatron and process
groups.

    buffer = TrajectoryBuffer(max_size=100_000)
    replay = SelectiveReplay(replay_probability=0.3)
    buffer.add(trajectories)                          # graded answers, as dictionaries or `types.Group`s
    for stored in replay.select(buffer, size=32):     # none in seven of ten steps
        w = compute_importance_weights(logprobs_now(stored), torch.tensor(stored.logprobs), shaping="ratio")

docs/python.md has the whole, examples/own_loop.py a loop that learns with it.
"""

from exgrpo_megatron.replay.buffer import AddReport, TrajectoryBuffer
from exgrpo_megatron.replay.difficulty import DifficultyBucketer
from exgrpo_megatron.replay.importance import compute_importance_weights
from exgrpo_megatron.replay.selective import SelectiveReplay
from exgrpo_megatron.replay.trajectories import ReplayedTrajectory

__all__ = [
    "AddReport",
    "DifficultyBucketer",
    "ReplayedTrajectory",
    "SelectiveReplay",
    "TrajectoryBuffer",
    "compute_importance_weights",
]
