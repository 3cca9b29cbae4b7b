"""The embedded task."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from exgrpo_megatron.data.chain_arithmetic import Chain, draw, draw_training, generate, guess
from exgrpo_megatron.data.generated import is_held_out
from exgrpo_megatron.errors import DataError

DIFFICULTIES = (2, 3, 4, 5, 6)


def evaluate(text: str) -> list[int]:
    """Partial results, by Python's own arithmetic on growing prefixes."""
    parts = re.findall(r"[+-]?\d+", text)
    return [sum(map(int, parts[: end + 1])) for end in range(len(parts))]


def test_answer_and_working_are_right_and_never_negative():
    for chain in generate(200, 3, DIFFICULTIES, held_out=False):
        partial = evaluate(chain.text)
        assert len(partial) == chain.num_terms
        assert min(partial) >= 0
        assert chain.answer == str(partial[-1])
        *steps, box = chain.worked.split("\n")
        assert box == f"\\boxed{{{partial[-1]}}}"
        for step, before, after in zip(steps, partial[:-1], partial[1:], strict=True):
            assert re.fullmatch(rf"{before}[+-]\d+={after}", step)
            assert evaluate(step.split("=")[0])[-1] == after


def test_difficulties_come_in_turn():
    counts = Counter(chain.num_terms for chain in generate(12, 0, DIFFICULTIES, held_out=False))
    assert counts == {2: 3, 3: 3, 4: 2, 5: 2, 6: 2}


def test_the_same_seed_gives_the_same_chains_and_a_larger_set_only_appends():
    small, large = (generate(size, 0, DIFFICULTIES, held_out=False) for size in (50, 80))
    assert large[:50] == small
    assert [chain.text for chain in small[:3]] == ["9-8", "5+3+5", "9-3+2-6"]
    assert generate(50, 1, DIFFICULTIES, held_out=False) != small


def test_training_and_held_out_sets_share_nothing_whatever_their_seeds():
    train = {chain.text for seed in range(4) for chain in generate(400, seed, DIFFICULTIES, held_out=False)}
    held_out = {chain.text for seed in range(4) for chain in generate(120, seed, DIFFICULTIES, held_out=True)}
    assert not train & held_out


def test_chains_are_distinct_and_not_among_those_excluded():
    first = [chain.text for chain in generate(300, 0, (3,), held_out=False)]
    second = [chain.text for chain in generate(300, 0, (3,), held_out=False, exclude=set(first))]
    assert len(set(first)) == 300
    assert not set(first) & set(second)


def test_every_term_is_one_digit_and_a_fifth_of_the_chains_is_held_out():
    rng = random.Random(0)
    texts = [draw(rng, 4).text for _ in range(3000)]
    assert {operand for text in texts for operand in re.findall(r"\d+", text)} == set("123456789")
    # 1 in 5 of 3,000: standard error 0.7%.
    assert sum(map(is_held_out, texts)) / 3000 == pytest.approx(0.2, abs=0.03)


def test_the_chains_of_two_terms_are_counted():
    # 81 sums and 45 differences that are not negative: 126 in all, each on one side.
    both = [
        chain.text
        for held_out, size in ((False, 96), (True, 30))
        for chain in generate(size, 0, (2,), held_out=held_out)
    ]
    assert len(set(both)) == 126


def test_fine_tuning_never_draws_a_held_out_chain():
    rng = random.Random(1)
    chains = [draw_training(rng, DIFFICULTIES) for _ in range(1000)]
    assert not any(is_held_out(chain.text) for chain in chains)
    assert set(Counter(chain.num_terms for chain in chains)) == set(DIFFICULTIES)


def test_a_guess_is_near_the_answer_and_right_in_2_of_10():
    rng, chain = random.Random(2), Chain("40+2", "42", "", 2)
    counts = Counter(int(re.fullmatch(r"\\boxed\{(\d+)\}", guess(rng, chain))[1]) - 42 for _ in range(5000))
    assert set(counts) == {0, 1, -1, 2, -2, 3, -3, 5, -5}
    assert counts[0] / 5000 == pytest.approx(0.2, abs=0.02)


def test_a_guess_is_never_negative():
    rng = random.Random(3)
    assert {guess(rng, Chain("1-1", "0", "", 2)) for _ in range(200)} == {f"\\boxed{{{n}}}" for n in (0, 1, 2, 3, 5)}


def test_more_chains_than_there_are_quotes_the_numbers():
    with pytest.raises(DataError, match=r"generator_size = 100000 with generator_difficulties = \[2\].*2 terms"):
        generate(100_000, 0, (2,), held_out=True)
