"""An engine that is replaced when it fails, while the step goes on with the same questions and seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor

from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.rollout.protocol import (
    EngineFailure,
    RolloutEngine,
    SampledResponse,
    SampleRequest,
    SamplingParams,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RestartingEngine:
    """Implements `RolloutEngine` by one that may fail. `load_weights` and `sample` are collective over all processes.

    Where the engine of one process fails, all processes replace theirs: engines are built together. The answers of
    the failed attempt are dropped everywhere and sampled again; seeds being those of the requests, they come out the
    same.
    """

    def __init__(
        self,
        make: Callable[[], RolloutEngine],
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        comm: Communicator,
        *,
        max_restarts: int,
    ) -> None:
        """`weights()` gives the weights that were loaded last once more; collective over all processes."""
        self._make, self._weights, self._comm, self._max_restarts = make, weights, comm, max_restarts
        self._engine = make()
        self._version = -1
        self.num_restarts = 0

    @property
    def shared_by_members(self) -> bool:
        """As the engine's."""
        return self._engine.shared_by_members

    @property
    def policy_version(self) -> int:
        """Version of the weights in force."""
        return self._engine.policy_version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As the engine's, which is replaced where it fails.

        Raises:
            UserError: it failed more often than the recipe admits; on every process.
        """
        self._version = version
        failure, _ = _attempt(lambda: self._engine.load_weights(weights, version))
        self._replace_while(failure)

    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        """As the engine's, which is replaced where it fails and then asked again.

        Raises:
            UserError: it failed more often than the recipe admits; on every process.
        """
        while True:
            failure, responses = _attempt(lambda: self._engine.sample(requests, params))
            if not self._replace_while(failure):
                assert responses is not None
                return responses

    def close(self) -> None:
        self._engine.close()

    def _replace_while(self, failure: EngineFailure | None) -> bool:
        """Replace the engine until one has the weights; whether there was a failure anywhere to begin with."""
        failed = False
        while self._comm.anywhere(failure is not None):
            failed = True
            self._count(failure)
            _attempt(self._engine.close)
            self._engine = self._make()
            failure, _ = _attempt(lambda: self._engine.load_weights(self._weights(), self._version))
        return failed

    def _count(self, failure: EngineFailure | None) -> None:
        reason = str(failure) if failure else "the rollout engine of another process failed"
        if self.num_restarts >= self._max_restarts:
            raise UserError(
                f"{reason}; it was replaced {self.num_restarts} times already, and "
                f"policy.generation.vllm_cfg.max_restarts = {self._max_restarts}"
            ) from failure
        self.num_restarts += 1
        logger.warning("%s; replacing it (%d of %d)", reason, self.num_restarts, self._max_restarts)


def _attempt(action: Callable[[], T]) -> tuple[EngineFailure | None, T | None]:
    """The failure, or the result."""
    try:
        return None, action()
    except EngineFailure as failure:
        return failure, None
