"""Counts of parameters, against published totals and the table that weights are loaded by."""

import json
import math
from dataclasses import replace

import pytest

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.data.embedded_model import CHAIN_QWEN2, MODELS, materialize
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan.known_models import KNOWN_MODELS, find_architecture
from exgrpo_megatron.plan.parameters import model_elements, stages

# The "total parameters" of the safetensors files on the Hugging Face hub.
PUBLISHED = {
    "embedded:chain-qwen2": 397_056,
    "embedded:symbols-qwen2": 226_080,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "models/Qwen2.5-Math-1.5B-16k": 1_543_714_304,  # of Qwen2.5-Math-1.5B: positions are no parameters
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Elliott/Qwen2.5-Math-7B-16k-think": 7_615_616_512,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
}


def architecture(name: str) -> Architecture:
    return Architecture.from_hf_config(KNOWN_MODELS[name])


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_shapes_have_the_published_number_of_parameters(name):
    arch = architecture(name)
    assert model_elements(arch) == PUBLISHED[name]
    assert model_elements(arch) == sum(math.prod(shape) for shape in manifest(arch).values())


@pytest.mark.parametrize("name", MODELS)
def test_the_known_shape_of_an_embedded_model_is_the_one_it_is_written_with(tmp_path, name):
    materialize(name, tmp_path / "model", seed=0)
    found = find_architecture(str(tmp_path / "model"))
    assert found is not None
    assert found[0] == architecture(name)


def test_norms_of_queries_and_keys_are_counted():
    config = {**KNOWN_MODELS["Qwen/Qwen2.5-7B-Instruct"], "model_type": "qwen3", "head_dim": 128}
    arch = Architecture.from_hf_config(config)
    assert model_elements(arch) == sum(math.prod(shape) for shape in manifest(arch).values())


def test_a_stage_of_7b_by_hand():
    """TP 2, PP 2: 14 layers a stage; 152064 rows are a multiple of 2 x 128 already."""
    first, last = stages(
        architecture("Qwen/Qwen2.5-Math-7B"),
        MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    )
    layer = 2 * 3584 + 1792 * 3584 + 2304 * 3584 + 2304 + 3 * 9472 * 3584
    assert first.elements == 76032 * 3584 + 14 * layer
    assert last.elements == 14 * layer + 3584 + 76032 * 3584
    assert [stage.num_layers for stage in (first, last)] == [14, 14]


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage():
    arch = architecture("Qwen/Qwen2.5-Math-1.5B")
    (only,) = stages(arch, MegatronConfig())
    first, last = stages(arch, MegatronConfig(pipeline_model_parallel_size=2))
    vocabulary = 152064 - 152064 % 128  # 151936 rows are 1187 x 128
    assert 151936 % 128 == 0
    assert first.elements + last.elements - only.elements == 151936 * 1536
    assert vocabulary >= 151936


def test_vocabulary_rows_are_padded_to_128_on_every_rank():
    arch = replace(architecture(CHAIN_QWEN2), tied=False)
    (stage,) = stages(arch, MegatronConfig(tensor_model_parallel_size=2))
    sizes = {parameter.name: parameter.elements for parameter in stage.chunks[0]}
    assert sizes["embedding.word_embeddings.weight"] == sizes["output_layer.weight"] == 128 * 128  # 21 rows: 2 x 128


def test_a_name_that_is_no_folder_and_not_known_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_architecture("somebody/else") is None
    found = find_architecture("models/Qwen2.5-Math-7B")
    assert found is not None
    assert found[1].startswith("the known shape of Qwen/Qwen2.5-Math-7B")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**KNOWN_MODELS["Qwen/Qwen2.5-32B"], "num_hidden_layers": 3}))
    found = find_architecture("mine")
    assert found is not None
    assert found[0].num_layers == 3
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"policy.model_name = 'mine'"):
        find_architecture("mine")
