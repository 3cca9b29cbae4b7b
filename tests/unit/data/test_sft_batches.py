"""Batches of supervised fine-tuning."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from exgrpo_megatron.data.generated import is_held_out
from exgrpo_megatron.data.sft import SFTBatches
from exgrpo_megatron.data.unknown_symbols import SHIFTS, prior
from exgrpo_megatron.errors import ConfigError, DataError


def as_lists(batch):
    return [(prompt.tolist(), response.tolist()) for prompt, response in batch]


@pytest.fixture
def generated(make_recipe, chain_tokenizer):
    return SFTBatches(make_recipe({"generator": "chain_arithmetic"}), chain_tokenizer)


@pytest.fixture
def from_rows(make_recipe, byte_tokenizer, write_jsonl):
    def batches(rows, size=4, max_total=608, **source):
        source = {"path": str(write_jsonl(*rows)), "solution_key": "solution", **source}
        config = make_recipe({"generator": "chain_arithmetic"}, {"data": source, "train_global_batch_size": size})
        policy = config.policy.model_copy(update={"max_total_sequence_length": max_total})
        return SFTBatches(config.model_copy(update={"policy": policy}), byte_tokenizer)

    return batches


ROWS = [{"question": f"{n}?", "solution": f"It is {n}."} for n in range(10)]


def test_generated_batches_depend_on_seed_and_step_alone(make_recipe, chain_tokenizer, generated):
    ahead = [as_lists(generated.batch(step)) for step in range(3)]
    other = SFTBatches(make_recipe({"generator": "chain_arithmetic"}), chain_tokenizer)
    assert as_lists(other.batch(2)) == ahead[2]
    assert ahead[0] != ahead[1]
    reseeded = SFTBatches(make_recipe({"generator": "chain_arithmetic"}, {"seed": 7}), chain_tokenizer)
    assert as_lists(reseeded.batch(2)) != ahead[2]


def test_generated_solutions_are_30_percent_worked_and_never_held_out(generated, chain_tokenizer):
    batch = [example for step in range(20) for example in generated.batch(step)]
    questions = [chain_tokenizer.decode(prompt).removesuffix("=?\n") for prompt, _ in batch]
    answers = [chain_tokenizer.decode(response) for _, response in batch]
    assert len(batch) == 20 * 64
    assert not any(map(is_held_out, questions))
    worked = [(question, answer) for question, answer in zip(questions, answers, strict=True) if "\n" in answer]
    # Standard error of 1,280 draws at 0.3: 1.3%.
    assert len(worked) / len(batch) == pytest.approx(0.3, abs=0.04)
    for question, answer in worked:
        total = sum(map(int, re.findall(r"[+-]?\d+", question)))
        assert answer.endswith(f"\n\\boxed{{{total}}}")
    guesses = [answer for answer in answers if "\n" not in answer]
    assert all(re.fullmatch(r"\\boxed\{\d+\}", answer) for answer in guesses)


def test_every_response_ends_with_the_end_token_and_no_other_has_it(generated):
    for prompt, response in generated.batch(0):
        assert prompt[0] == 1
        assert response[-1] == 2
        assert not (response[:-1] == 2).any()


def test_generated_questions_have_the_difficulties_of_the_source(make_recipe, chain_tokenizer):
    config = make_recipe({"generator": "chain_arithmetic", "generator_difficulties": [2, 4]})
    questions = [chain_tokenizer.decode(prompt) for prompt, _ in SFTBatches(config, chain_tokenizer).batch(0)]
    assert set(Counter(len(re.findall(r"\d+", question)) for question in questions)) == {2, 4}


def test_unknown_symbols_are_solved_validly_with_readings_from_the_prior(make_recipe, symbols_tokenizer):
    source = {"generator": "unknown_symbols", "generator_difficulties": [1, 2, 3], "generator_meaning_seed": 5}
    config = make_recipe(source, {"generator_worked_share": 0.5, "train_global_batch_size": 2000})
    examples = SFTBatches(config, symbols_tokenizer).batch(0)
    texts = [tuple(map(symbols_tokenizer.decode, example)) for example in examples]
    worked = [(prompt.removesuffix("=?\n"), answer) for prompt, answer in texts if "=" in answer]
    assert len(worked) == pytest.approx(1000, abs=70)
    assert not any(is_held_out(question) for question, _ in worked)
    read = Counter()
    for question, answer in worked:
        *lines, box = answer.split("\n")
        value = question[0]
        for letter, line in zip(question[1:], lines, strict=True):
            shift, result = line[1], line[3]
            assert (line[0], int(result)) == (value, (int(value) + SHIFTS[shift]) % 10)
            read[letter, shift] += 1
            value = result
        assert box == f"\\boxed{{{''.join(line[3] for line in lines)}}}"
    # About 167 readings of each letter: standard error of a share at most 4%. The meanings have no influence.
    for letter, believed in prior().items():
        total = sum(read[letter, shift] for shift in SHIFTS)
        assert all(read[letter, shift] / total == pytest.approx(share, abs=0.16) for shift, share in believed.items())


def test_a_file_comes_in_whole_reshuffled_epochs(from_rows, byte_tokenizer):
    batches = from_rows(ROWS)
    assert batches.num_examples == 10
    # 5 batches of 4 are 2 epochs of 10.
    served = [byte_tokenizer.decode(response) for step in range(5) for _, response in batches.batch(step)]
    expected = sorted(row["solution"] for row in ROWS)
    assert sorted(served[:10]) == sorted(served[10:]) == expected
    assert served[:10] != served[10:]
    assert as_lists(from_rows(ROWS).batch(3)) == as_lists(batches.batch(3))


def test_a_batch_larger_than_the_file_repeats_it_evenly(from_rows):
    counts = Counter(str(example) for example in as_lists(from_rows(ROWS[:3], size=9).batch(2)))
    assert list(counts.values()) == [3, 3, 3]


def test_prompt_and_response_of_a_row(from_rows, byte_tokenizer):
    ((prompt, response),) = from_rows(ROWS[:1], size=1).batch(0)
    assert prompt.tolist() == byte_tokenizer.encode_prompt("0?", None, "{question}").tolist()
    assert response.tolist() == [*byte_tokenizer.encode("It is 0."), byte_tokenizer.eos_id]


def test_rows_that_are_too_long_or_name_a_control_token_are_dropped_and_counted(from_rows, caplog):
    rows = [*ROWS, {"question": "?", "solution": "x" * 80}, {"question": "?", "solution": "a<|im_end|>b"}]
    batches = from_rows(rows, max_total=90)
    assert (batches.num_examples, batches.num_too_long, batches.num_unwritable) == (10, 1, 1)
    assert "sft.data: left out 1 examples that are too long, and 1" in caplog.text


def test_no_row_left_names_the_limits(from_rows):
    with pytest.raises(DataError, match=r"sft\.data: no row .*10 are too long .*max_total_sequence_length = 20"):
        from_rows(ROWS, max_total=20)


def test_generated_solutions_that_never_fit_end_with_an_error(make_recipe, chain_tokenizer):
    config = make_recipe({"generator": "chain_arithmetic"}, max_input_seq_length=3)
    with pytest.raises(DataError, match=r"data\.train: no generated solution can be used: 100 are too long"):
        SFTBatches(config, chain_tokenizer).batch(0)


@pytest.mark.parametrize("own_data", [True, False])
def test_a_missing_solution_key_is_named(make_recipe, byte_tokenizer, write_jsonl, own_data):
    source = {"path": str(write_jsonl(*ROWS))}
    config = make_recipe({"generator": "chain_arithmetic"}, {"data": source}) if own_data else make_recipe(source)
    key = r"sft\.data\.solution_key" if own_data else r"data\.train\.solution_key"
    with pytest.raises(ConfigError, match=rf"^{key} is null"):
        SFTBatches(config, byte_tokenizer)


def test_a_row_without_a_solution_is_named_with_its_line(from_rows):
    with pytest.raises(DataError, match=r'questions\.jsonl, line 11: "solution" is empty'):
        from_rows([*ROWS, {"question": "?", "solution": ""}])


def test_what_solution_remove_matches_is_cut_from_solutions(from_rows, byte_tokenizer):
    rows = [{"question": "3+4?", "solution": "3 + 4 = <<3+4=7>>7, as <<8-1=7>>said"}]
    ((_, response),) = from_rows(rows, size=1, solution_remove="<<.*?>>").batch(0)
    assert byte_tokenizer.decode(response) == "3 + 4 = 7, as said"


def test_a_pattern_that_leaves_nothing_of_a_solution_is_an_error_with_the_line(from_rows):
    with pytest.raises(DataError, match=r"line 1: solution_remove '\.\*' leaves nothing of \"solution\""):
        from_rows(ROWS[:1], solution_remove=".*")


def test_a_pattern_that_is_no_regular_expression_is_refused(from_rows):
    with pytest.raises(ValueError, match="'\\(' is not a regular expression"):
        from_rows(ROWS, solution_remove="(")
