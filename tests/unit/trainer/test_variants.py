"""Every switch of `config.VARIANTS` and every key of `experience:` changes what it says, through `Trainer.step`.

Unless a test says otherwise: B = 4 questions, K = 4 answers, replay on from the first step at rho = 0.5, and with seed
10 twelve questions stand in line as 6 4 2 12 | 9 5 7 11 | 3 8 1 10.
"""

import numpy as np
import pytest
from scripted import build_trainer, plant, replayed_members, right, token_ids, wrong


def all_wrong(name, samples):
    return [wrong(name)] * samples


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer whose engine follows a script."""

    def build(script=all_wrong, **sections):
        return build_trainer(tmp_path, script, comm=data_parallel, **sections)

    return build


# --- experience.stored_answer


@pytest.mark.parametrize(("form", "padded"), [("tokens", 0), ("text", 1)])
def test_stored_answer_text_adds_an_eos_of_probability_one_to_a_truncated_answer(make, form, padded):
    trainer = make(experience={"stored_answer": form})
    whole = token_ids(trainer, right("q1"))
    plant(trainer, "q1", [whole[:-1]])
    result = trainer.step()
    member = replayed_members(result.groups)["q1"]
    np.testing.assert_array_equal(member.token_ids, whole if padded else whole[:-1])
    assert (member.logprobs[len(whole) - 1 :] == 0.0).sum() == padded
    assert result.metrics["experience/padded_logprobs"] == padded


def test_padded_log_probs_are_counted_for_the_replayed_answers_only(make):
    trainer = make(experience={"stored_answer": "text"})
    plant(trainer, "q1", [token_ids(trainer, right("q1", style))[:-1] for style in (0, 1, 2)])
    assert trainer.step().metrics["experience/padded_logprobs"] == 1


def test_stored_answer_text_keeps_special_tokens_inside_the_answer(make):
    """The released code decodes with special tokens, so that the recorded log-probs still have their tokens."""
    trainer = make(experience={"stored_answer": "text"})
    bos = trainer.questions["q1"].prompt_ids[0]
    inside = np.insert(token_ids(trainer, right("q1")), 1, bos).astype(np.int32)
    plant(trainer, "q1", [inside])
    result = trainer.step()
    np.testing.assert_array_equal(replayed_members(result.groups)["q1"].token_ids, inside)
    assert result.metrics["experience/padded_logprobs"] == 0
