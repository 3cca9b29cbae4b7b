"""Every shipped recipe loads; those for many GPUs fit where they say they do."""

from pathlib import Path

import pytest

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan.known_models import find_architecture
from exgrpo_megatron.plan.planner import GIB, Plan, check_fits, make_plan
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.recipe_table import derived_table

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
# GPUs, and the most of one in docs/recipes.md, in GiB.
MANY_GPUS = {
    "qwen2.5_math_1.5b_1gpu": (1, 66),
    "qwen2.5_math_1.5b_8gpu": (8, 67),
    "qwen2.5_math_7b_8gpu": (8, 72),
    "qwen2.5_7b_instruct_8gpu": (8, 72),
    "llama_3.1_8b_8gpu": (8, 70),
    "llama_3.1_8b_instruct_8gpu": (8, 70),
    "llama_3.1_8b_16gpu": (16, 68),
    "qwen2.5_32b_32gpu": (32, 70),
    "llama_3.1_70b_64gpu": (64, 71),
}

PAPERS_TABLE = {
    "questions a step": "128, of which at most 64 replayed",
    "answers a question (K)": "8; a replayed question samples one less",
    "sequences trained a step": "1024",
    "rollouts a step": "1024 without replay, at least 960 with it",
    "sequences an optimiser step": "512",
    "optimiser steps a step": "2",
    "optimiser steps in all": "1400",
}


def planned(name: str, *overrides: str) -> Plan:
    config = load_recipe(RECIPES / f"{name}.yaml", overrides)
    found = find_architecture(config.policy.model_name)
    assert found is not None
    assert config.cluster.num_nodes is not None
    assert config.cluster.gpus_per_node is not None
    plan = make_plan(config, found[0], config.cluster.num_nodes * config.cluster.gpus_per_node, 80 * GIB)
    check_fits(plan, config)
    return plan


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_loads_and_the_documentation_links_it(path):
    if path.parent.name != "evaluation":  # parts, put above the recipe of a model: test_paper_protocol.py
        load_recipe(path)
    assert f"../recipes/{path.relative_to(RECIPES)}" in (RECIPES.parent / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("name", MANY_GPUS)
def test_a_recipe_for_many_gpus_fits_into_80_gib(name):
    plan, (gpus, most) = planned(name), MANY_GPUS[name]
    assert plan.ranks.world_size == gpus
    assert round(max(max(plan.peaks(stage).values()) for stage in plan.stages) / GIB) == most
    assert f"({most} GiB" in (RECIPES / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", MANY_GPUS)
def test_a_recipe_for_many_gpus_says_all_commands_from_the_data_to_the_export(name):
    gpus, _ = MANY_GPUS[name]
    config = load_recipe(RECIPES / f"{name}.yaml")
    text = (RECIPES / f"{name}.yaml").read_text()
    nodes = f"--nnodes {gpus // 8} " if gpus > 8 else ""
    assert f"torchrun {nodes}--nproc-per-node {min(gpus, 8)} " in text
    assert config.data.validation is not None
    for said in (
        f"--out {config.data.train.path} ",
        f"--held-out {config.data.validation.path}\n",
        f"exgrpo show recipes/{name}.yaml --world-size {gpus}",
        f"-m exgrpo_megatron train recipes/{name}.yaml",
        f"-m exgrpo_megatron eval recipes/{name}.yaml --checkpoint {config.logger.log_dir}/hf",
        f"exgrpo export {config.logger.log_dir} ",
        config.policy.model_name,
    ):
        assert said in text.replace("\\\n#           ", "")


@pytest.mark.parametrize("name", MANY_GPUS)
def test_their_batch_is_the_papers(name):
    config = load_recipe(RECIPES / f"{name}.yaml")
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (128, 8)
    assert config.updates_per_step == 2
    assert (config.data.max_input_seq_length, config.policy.generation.max_new_tokens) == (1024, 8192)
    assert config.policy.megatron_cfg.optimizer.lr == 1e-6
    assert config.max_replayed_per_step == 64
    # 0.35 as in the paper's main run, but no delay for the weakest model.
    assert config.experience.start_pass_rate == (None if name == "llama_3.1_8b_8gpu" else 0.35)


@pytest.mark.parametrize("name", MANY_GPUS)
def test_the_table_of_their_numbers_is_the_papers_batch(name):
    """128 questions by 8 answers, half of the questions replayed, in two optimiser steps; a replayed one samples 7."""
    table = dict(derived_table(load_recipe(RECIPES / f"{name}.yaml")))
    assert {key: table[key] for key in PAPERS_TABLE} == PAPERS_TABLE


@pytest.mark.parametrize("name", MANY_GPUS)
def test_a_recipe_for_many_gpus_says_its_devices_and_what_the_paper_has_of_it(name):
    text = (RECIPES / f"{name}.yaml").read_text()
    gpus, machines = MANY_GPUS[name][0], {1: "one machine", 2: "two machines", 4: "four machines", 8: "eight machines"}
    devices = "one GPU" if gpus == 1 else f"{machines[gpus // 8]} with 8 GPUs"
    assert f" on {devices} of 80 GB" in text.partition("\n#\n")[0].replace("\n# ", " ")
    paper = text.partition("# Paper:  ")[2]
    own = not name.endswith(("32b_32gpu", "70b_64gpu"))
    assert paper.startswith("over its five models" if own else "arXiv:2510.02245 has no run of this model")


def test_the_prompt_of_the_base_model_asks_for_a_box():
    config = load_recipe(RECIPES / "llama_3.1_8b_8gpu.yaml")
    assert config.env.math.require_box
    assert config.data.prompt_template.replace("{question}", "What is 1+1?") == (
        "Question: What is 1+1?\nPut the final answer in \\boxed{}.\nAnswer: Let's think step by step.\n"
    )


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["policy.generation.vllm_cfg.gpu_memory_utilization=0.2"], ["room for", "gpu_memory_utilization (0.2)"]),
        (["policy.generation.vllm_cfg.gpu_memory_utilization=0.7"], ["rollout needs", "gpu_memory_utilization (0.7)"]),
        (["policy.generation.vllm_cfg.tensor_parallel_size=3"], ["does not divide the model's num_attention_heads"]),
        (["policy.generation.vllm_cfg.tensor_parallel_size=4", "policy.megatron_cfg.tensor_model_parallel_size=2",
          "policy.megatron_cfg.pipeline_model_parallel_size=8"], ["must divide policy.megatron_cfg.tensor_model"]),
        (["policy.megatron_cfg.activation_checkpointing=false", "policy.sequence_packing.train_mb_tokens=18432"],
         ["update needs", "activations 88.0", "activation_checkpointing = true", "train_mb_tokens (18432)"]),
        (["policy.generation.backend=embedded", "policy.generation.max_batch_size=8"],
         ["weight push needs", "second rollout weights 262.8", "= vllm"]),
    ],
    ids=["no room for one answer", "too much for vLLM", "heads", "layout", "activations", "embedded"],
)  # fmt: skip
def test_what_does_not_fit_70b_is_refused_with_what_to_change(overrides, texts):
    with pytest.raises(ConfigError) as caught:
        planned("llama_3.1_70b_64gpu", *overrides)
    for text in texts:
        assert text in str(caught.value)


def quickstart(processes: int, *overrides: str) -> Plan:
    """256 sequences of up to 128 positions a step, 96 of them an answer's; 32 and 256 of them a micro-batch."""
    config = load_recipe(RECIPES / "quickstart.yaml", overrides)
    found = find_architecture(config.policy.model_name)
    assert found is not None
    return make_plan(config, found[0], processes, 80 * GIB)


@pytest.mark.parametrize(
    ("processes", "overrides", "rows"),
    [
        (8, [], 32),
        (64, [], 4),
        (48, [], 6),  # some ranks have 5
        (64, ["policy.megatron_cfg.tensor_model_parallel_size=2"], 8),
        (64, ["policy.train_micro_batch_size=null"], 4),
    ],
)
def test_a_micro_batch_has_no_more_sequences_than_a_rank_has_of_an_optimiser_step(processes, overrides, rows):
    train = quickstart(processes, *overrides).train
    assert (train.positions, train.response_tokens) == (rows * 128, rows * 96)


def test_a_token_budget_is_filled_no_further_than_by_all_sequences_of_a_rank():
    budget = ("policy.train_micro_batch_size=null", "policy.logprob_batch_size=null",
              "policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=4096")  # fmt: skip
    assert quickstart(8, *budget).train.positions == 4096
    assert quickstart(16, *budget).train.positions == 16 * 128
    assert quickstart(16, *budget).score.positions == 128


@pytest.mark.parametrize(
    ("processes", "overrides", "rows"),
    [
        (8, [], 4 * 8),  # questions of a step by answers
        (64, [], 8),
        (64, ["data.validation.generator_size=6400", "eval.num_tests_per_prompt=2"], 100 * 2),
        (64, ["data.validation.generator_size=6400", "eval.num_tests_per_prompt=4"], 256),
        (64, ["data.validation=null"], 8),
        (64, ["data.validation.generator=null",
              "data.validation.path=held_out.jsonl"], 256),
    ],
)  # fmt: skip
def test_the_embedded_engine_has_room_for_the_answers_of_a_step_and_of_an_evaluation(processes, overrides, rows):
    assert quickstart(processes, *overrides).rollout.kv_tokens == rows * 128
