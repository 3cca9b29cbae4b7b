"""The embedded model as a Hugging Face folder."""

from __future__ import annotations

import json

import pytest
import torch

from exgrpo_megatron.data.embedded_model import CHAIN_QWEN2, is_embedded, materialize
from exgrpo_megatron.errors import ConfigError


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_loads_as_a_qwen2_of_397056_parameters_with_nothing_missing_or_unexpected(chain_folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(chain_folder, output_loading_info=True)
    # Embedding 21*128; a layer: q 128*128+128, k and v 128*64+64 each, o 128*128, three 128*384, two norms of 128;
    # the last norm 128: 2688 + 2 * 197,120 + 128.
    assert sum(parameter.numel() for parameter in model.parameters()) == 397_056
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


def test_autotokenizer_reads_it_and_its_chat_template(chain_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chain_folder)
    text = "7+5=12\n12-3=9\n\\boxed{9}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (len(ids), tokenizer.decode(ids)) == (17, text)
    messages = [{"role": "user", "content": "7+5"}, {"role": "assistant", "content": "\\boxed{12}"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>7+5=?\n\\boxed{12}<eos>"


def test_the_model_of_unknown_symbols_has_226080_parameters_and_reads_its_task(symbols_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Embedding 42*96; a layer: q 96*96+96, k and v 96*48+48 each, o 96*96, three 96*288, two norms of 96; the last
    # norm 96: 4032 + 2 * 110,976 + 96.
    model = AutoModelForCausalLM.from_pretrained(symbols_folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 226_080
    tokenizer = AutoTokenizer.from_pretrained(symbols_folder)
    messages = [{"role": "user", "content": "9cd"}, {"role": "assistant", "content": "9E=6\n6B=9\n\\boxed{69}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<bos>9cd=?\n9E=6\n6B=9\n\\boxed{69}<eos>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # One token a character, but for <bos>, <eos> and the box.
    assert len(ids) == 1 + len("9cd=?.9E=6.6B=9.") + 1 + len("69}") + 1
    assert tokenizer.decode(ids) == text


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(chain_folder, tmp_path):
    same = materialize(CHAIN_QWEN2, tmp_path / "same", seed=0)
    other = materialize(CHAIN_QWEN2, tmp_path / "other", seed=1)
    assert contents(same) == contents(chain_folder)
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (same / weights).read_bytes()


def test_making_it_leaves_the_random_state_of_the_program_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    materialize(CHAIN_QWEN2, tmp_path / "model", seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_unchanged_model_is_reused_and_one_of_another_seed_replaced(tmp_path):
    folder = materialize(CHAIN_QWEN2, tmp_path / "new" / "model", seed=0)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    materialize(CHAIN_QWEN2, folder, seed=0)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    materialize(CHAIN_QWEN2, folder, seed=1)
    assert json.loads((folder / "embedded.json").read_text())["seed"] == 1
    # Nothing that was written aside is left over.
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_changed_model_is_never_overwritten(tmp_path):
    folder = materialize(CHAIN_QWEN2, tmp_path / "model", seed=0)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model is in the way"):
        materialize(CHAIN_QWEN2, folder, seed=0)
    assert (folder / "config.json").read_text() == "{}"


def test_a_folder_of_other_things_is_never_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        materialize(CHAIN_QWEN2, tmp_path, seed=0)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match="in the way"):
        materialize(CHAIN_QWEN2, tmp_path / "model", seed=0)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write embedded:chain-qwen2 to .*file.model"):
        materialize(CHAIN_QWEN2, tmp_path / "file" / "model", seed=0)


def test_an_unknown_embedded_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"'embedded:gpt'.*embedded:chain-qwen2"):
        materialize("embedded:gpt", tmp_path / "model", seed=0)


def test_embedded_names_are_told_from_folders():
    assert is_embedded(CHAIN_QWEN2)
    assert not is_embedded("models/qwen2")
