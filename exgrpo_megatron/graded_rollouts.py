"""The questions of a step answered and graded: samples of the engine, rewards, denominators of the ratio."""

from __future__ import annotations

from dataclasses import replace

from exgrpo_megatron.algorithm.chance import stable_seeds
from exgrpo_megatron.comm import all_gather_concat, in_order
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest
from exgrpo_megatron.rollout.sharing import sample_share
from exgrpo_megatron.step_metrics import StepClock
from exgrpo_megatron.types import Group, Slot, StoredAnswer, Trajectory


class GradedRollouts:
    """Makes the groups of a step; collective, with the same slots on every process."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config

    def groups(self, slots: list[Slot], step: int, clock: StepClock) -> tuple[list[Group], list[Verdict]]:
        """Every slot's group with rewards and old log-probs; each process samples and grades its part of the share that
        its data-parallel rank scores."""
        comm = self.parts.comm
        mine = list(range(comm.rank, len(slots), comm.size))
        with clock.phase("rollout"):
            sampled = self._sample([slots[i] for i in mine], step)
        with clock.phase("reward"):
            graded = list(zip(sampled, self._grade(list(sampled.values())), strict=True))
        share = in_order(pair for part in comm.gather_members(graded) for pair in part)
        groups, verdicts = [group for group, _ in share], [listed for _, listed in share]
        if self.config.loss_fn.old_logprobs == "recomputed":
            with clock.phase("old_logprobs"):
                groups = self._recomputed_logprobs(groups)
        everyone = in_order(all_gather_concat(comm, list(zip(mine, zip(groups, verdicts, strict=True), strict=True))))
        return [group for group, _ in everyone], [verdict for _, listed in everyone for verdict in listed]

    def _sample(self, slots: list[Slot], step: int) -> dict[int, Group]:
        """By index the groups of this process's part of the slots: K new answers for a new question, K-1 and the stored
        one for a replayed question."""
        requests = [self._request(slot, step) for slot in slots]
        sampled = sample_share(self.parts.engine, requests, self.parts.sampling, self.parts.comm)
        return {index: _group(slots[index], responses) for index, responses in sampled.items()}

    def _request(self, slot: Slot, step: int) -> SampleRequest:
        replayed = slot.stored is not None
        count = self.config.grpo.num_generations_per_prompt - replayed
        return SampleRequest(
            slot.question.prompt_ids, stable_seeds(count, self.config.grpo.seed, step, slot.question.id, replayed)
        )

    def _grade(self, groups: list[Group]) -> list[tuple[Group, list[Verdict]]]:
        """The groups with rewards, each with the verdicts of its new answers."""
        items = [
            (self.parts.tokenizer.decode(member.token_ids), group.question.answer, group.question.text)
            for group in groups
            for member in group.trajectories
        ]
        verdicts = iter(self.parts.verifier.grade(items))
        graded = []
        for group in groups:
            pairs = [(member, next(verdicts)) for member in group.trajectories]
            rewarded = tuple([member.graded(verdict.reward, verdict.correct) for member, verdict in pairs])
            graded.append(
                (Group(group.question, rewarded), [verdict for member, verdict in pairs if not member.replayed])
            )
        return graded

    def _recomputed_logprobs(self, groups: list[Group]) -> list[Group]:
        """New answers' log-probs recomputed by the policy before the update; replayed ones keep the recorded."""
        pairs = [
            (group.question.prompt_ids, member.token_ids)
            for group in groups
            for member in group.trajectories
            if not member.replayed
        ]
        scored = iter(self.parts.policy.score(pairs, self.parts.sampling.temperature))
        return [
            Group(
                group.question,
                tuple(
                    member
                    if member.replayed
                    else replace(member, logprobs=next(scored).logprobs, engine_logprobs=member.logprobs)
                    for member in group.trajectories
                ),
            )
            for group in groups
        ]


def _group(slot: Slot, responses: list[SampledResponse]) -> Group:
    new = [
        Trajectory(response.token_ids, response.logprobs, 0.0, False, response.stop_reason, response.policy_version)
        for response in responses
    ]
    return Group(slot.question, (*new, *_replayed_member(slot.stored)))


def _replayed_member(stored: StoredAnswer | None) -> tuple[Trajectory, ...]:
    if stored is None:
        return ()
    return (
        Trajectory(stored.token_ids, stored.logprobs, 0.0, True, "stop", stored.policy_version, serial=stored.serial),
    )
