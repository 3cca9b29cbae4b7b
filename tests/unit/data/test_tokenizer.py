"""The wrapped tokenizer: prompts, round trips, stop tokens, and every way a folder can be wrong."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer
from exgrpo_megatron.errors import ConfigError


def test_the_prompt_of_a_chain_ends_where_the_answer_begins(chain_tokenizer):
    ids = chain_tokenizer.encode_prompt("7+5-3", None, "{question}")
    # <bos> is 1; the digit d is 3 + d; then + - * = ? newline are 13 to 18.
    assert ids.tolist() == [1, 10, 13, 8, 14, 6, 16, 17, 18]
    assert ids.dtype == np.int32


def test_the_box_is_one_token_and_a_solution_survives_the_round_trip(chain_tokenizer):
    solution = "7+5=12\n12-3=9\n\\boxed{9}"
    ids = chain_tokenizer.encode(solution)
    assert ids == [10, 13, 8, 16, 4, 5, 18, 4, 5, 14, 6, 16, 12, 18, 20, 12, 19]
    assert chain_tokenizer.decode(ids) == solution
    assert chain_tokenizer.decode([*ids, chain_tokenizer.eos_id]) == solution


def test_end_token_and_size_of_the_embedded_vocabulary(chain_tokenizer):
    assert (chain_tokenizer.eos_id, chain_tokenizer.eos_text, chain_tokenizer.vocab_size) == (2, "<eos>", 21)


def test_the_size_counts_the_gaps_between_ids(tmp_path):
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {character: 2 * index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    spread = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token=None, pad_token=None, unk_token=None)
    # 256 bytes have ids up to 510: a model needs rows for all of these.
    assert len(spread) < 300
    assert PromptTokenizer(spread, tmp_path).vocab_size >= 511


def test_system_prompt_and_template_are_rendered_by_the_chat_template(byte_tokenizer):
    ids = byte_tokenizer.encode_prompt("2 + {x}?", "Be brief.", "Q: {question}\nA:")
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: 2 + {x}?\nA:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.tolist() == byte_tokenizer.encode(expected)
    # 5 control tokens, and one byte a character otherwise.
    controls = ("<|im_start|>", "<|im_end|>")
    assert len(ids) == 5 + len(expected) - sum(expected.count(control) * len(control) for control in controls)


def test_without_a_chat_template_the_prompt_is_the_plain_text_and_that_is_said(byte_folder, altered, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(altered(byte_folder, chat_template__jinja=None))
    assert not tokenizer.has_chat_template
    assert "no chat template" in caplog.text
    assert tokenizer.encode_prompt("2+2?", "Be brief.", "{question}").tolist() == tokenizer.encode("Be brief.\n\n2+2?")


def test_a_template_that_writes_the_date_gives_the_same_prompt_every_day(byte_folder, altered):
    template = "{{ strftime_now('%d %b %Y') }}|{{ messages[0]['content'] }}"
    tokenizer = load_tokenizer(altered(byte_folder, chat_template__jinja=template))
    assert tokenizer.encode_prompt("2+2?", None, "{question}").tolist() == tokenizer.encode("26 Jul 2024|2+2?")


def test_a_template_without_system_messages_names_the_key_to_change(byte_folder, altered):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    tokenizer = load_tokenizer(altered(byte_folder, chat_template__jinja=template))
    with pytest.raises(ConfigError, match=r"no system role.*data\.system_prompt"):
        tokenizer.encode_prompt("2+2?", "Be brief.", "{question}")


@pytest.mark.parametrize(
    # Spaces are not in the vocabulary either, but losing them is not losing the question.
    ("text", "writable"),
    [("7+5-3", True), ("", True), ("7 + 5\n", True), ("seven+5", False), ("7+5<eos>", False)],
)
def test_text_outside_the_embedded_vocabulary_is_recognised(chain_tokenizer, text, writable):
    assert chain_tokenizer.can_write(text) == writable


def test_a_byte_level_vocabulary_writes_everything_but_the_names_of_special_tokens(byte_tokenizer):
    assert byte_tokenizer.can_write("Ünïcode ﬁ 数学 🙂 \\frac{1}{2}")
    assert not byte_tokenizer.can_write("ignore this<|im_end|>")
    assert byte_tokenizer.can_write("<|im_start|>user", special_tokens=True)


@pytest.mark.parametrize(("content", "expected"), [(None, (2,)), (5, (2, 5)), ([7, 2, 5], (2, 5, 7)), ("absent", (2,))])
def test_stop_tokens_are_those_of_the_generation_config_and_the_tokenizer(chain_folder, altered, content, expected):
    text = json.dumps({} if content == "absent" else {"eos_token_id": content})
    folder = altered(chain_folder, generation_config__json=text)
    assert load_tokenizer(folder).stop_token_ids(folder) == expected


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, -2]}'])
def test_a_damaged_generation_config_is_named(chain_folder, altered, content):
    folder = altered(chain_folder, generation_config__json=content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_tokenizer(folder).stop_token_ids(folder)


def test_a_model_that_nothing_stops_names_the_key_to_set(chain_folder, altered):
    config = json.loads((chain_folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    folder = altered(chain_folder, tokenizer_config__json=json.dumps({**config, "eos_token": None}))
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"policy\.generation\.stop_token_ids"):
        load_tokenizer(folder).stop_token_ids(folder)


def test_a_missing_folder_names_key_and_path(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder .*nowhere.*policy\.tokenizer\.name.*policy\.model_name"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_a_vocabulary_is_refused_where_transformers_would_make_one_up(chain_folder, altered):
    folder = altered(chain_folder, tokenizer__json=None)
    with pytest.raises(ConfigError, match=r"no tokenizer in .*altered.*tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{ not json", "{}", "[]", '{"added_tokens": [], "model": {"type": "Nothing"}}'])
def test_a_damaged_tokenizer_names_its_folder(chain_folder, altered, content):
    folder = altered(chain_folder, tokenizer__json=content)
    with pytest.raises(ConfigError, match=r"altered.*cannot be read"):
        load_tokenizer(folder)
