"""Before a run begins: installation, recipe, questions, model, memory."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch
from cli_project import rows, write_lines
from troubles import Place, error_of, trouble

from exgrpo_megatron import accelerators
from exgrpo_megatron.accelerators import Accelerators, Library, hide_unusable
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.metric_sinks import JsonlSink
from exgrpo_megatron.plan.known_models import find_architecture
from exgrpo_megatron.policy import reference_model
from exgrpo_megatron.rollout import vllm_checks

ROOT = Path(__file__).resolve().parents[3]


# Installation


@trouble
def no_python(place: Place) -> str:
    command = ["make", "-C", ROOT, "setup", "PYTHON=", f"VENV={place.folder / 'venv'}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stderr


@trouble
def no_vllm(place: Place) -> str:
    place.patch.setattr(vllm_checks, "is_installed", lambda: False)
    return place.fails("train", "recipe.yaml", "policy.generation.backend=vllm")


@trouble
def half_installed(place: Place) -> str:
    """The fault is that of the wheel of transformer-engine without its torch part (test_accelerators.py)."""
    place.patch.setattr(accelerators, "hide", lambda _: None)
    fault = "RuntimeError: Found empty `transformer-engine` meta package installed."
    engine, absent = Library("transformer-engine", "2.20.2", fault), Library("apex")
    hide_unusable(Accelerators("NVIDIA H100", engine, absent, absent))
    return place.logged()


# Recipe


def shown(place: Place, *overrides: str) -> str:
    return place.fails("show", "recipe.yaml", *overrides)


@trouble
def unknown_key(place: Place) -> str:
    return shown(place, "grpo.sead=1")


@trouble
def key_of_nemo_rl(place: Place) -> str:
    return shown(place, "policy.generation.top_p=0.9")


@trouble
def key_of_verl(place: Place) -> str:
    return shown(place, "data.train_batch_size=128", "actor_rollout_ref.rollout.n=8")


@trouble
def groups_split(place: Place) -> str:
    return shown(place, "policy.train_global_batch_size=3")


@trouble
def batch_not_divided(place: Place) -> str:
    return shown(place, "grpo.num_prompts_per_step=3")


@trouble
def no_room_for_a_sequence(place: Place) -> str:
    return shown(place, "policy.generation.max_new_tokens=4096")


@trouble
def without_effect(place: Place) -> str:
    return shown(place, "experience.bucket_sigma=2", "experience.bucket_weight=linear")


@trouble
def number_as_text(place: Place) -> str:
    return shown(place, "policy.megatron_cfg.optimizer.lr=1e-6,")


@trouble
def override_without_value(place: Place) -> str:
    return shown(place, "grpo.seed")


@trouble
def no_recipe(place: Place) -> str:
    return place.fails("train", "recipes/mine.yaml")


@trouble
def braces_without_quotes(place: Place) -> str:
    return shown(place, "data.prompt_template={question}")


# Questions


def trained_on(place: Place, *lines: object) -> str:
    write_lines(place.folder / "train.jsonl", *lines)
    return place.fails("train", "recipe.yaml")


@trouble
def no_file(place: Place) -> str:
    return place.fails("train", "recipe.yaml", "data.train.path=data/train.jsonl")


@trouble
def no_column(place: Place) -> str:
    return trained_on(place, {"id": "q1", "problem": "1+1", "answer": "2"})


@trouble
def cut_line(place: Place) -> str:
    return trained_on(place, rows(1, 1)[0], '{"id": "q2", "question": "1+')


@trouble
def no_marker(place: Place) -> str:
    return place.fails("train", "recipe.yaml", "data.train.answer_marker='####'")


@trouble
def two_answers(place: Place) -> str:
    return trained_on(place, *rows(1, 2), {"id": "q9", "question": "1+1", "answer": 3})


@trouble
def all_too_long(place: Place) -> str:
    return trained_on(place, {"id": "q1", "question": "1+" * 20 + "1", "answer": 21})


@trouble
def too_few(place: Place) -> str:
    return trained_on(place, *rows(1, 1))


@trouble
def gold_not_accepted(place: Place) -> str:
    write_lines(place.folder / "train.jsonl", *({"id": f"q{n}", "question": f"{n}+1", "answer": "?"} for n in (1, 2)))
    return place.fails("train", "recipe.yaml", "env.math.require_literal=true")


@trouble
def in_both_sets(place: Place) -> str:
    write_lines(place.folder / "held_out.jsonl", *rows(4, 2))
    return place.fails("train", "recipe.yaml", "experience.prefill_path=none")


@trouble
def nothing_prepared(place: Place) -> str:
    write_lines(place.folder / "raw.jsonl", {"problem": "Prove it.", "answer": "proof"})
    return place.fails("data", "prepare", "raw.jsonl", "--out", "out.jsonl", "--format", "openr1")


@trouble
def prepared_before(place: Place) -> str:
    write_lines(place.folder / "raw.jsonl", {"problem": "1+1", "answer": "2"})
    write_lines(place.folder / "out.jsonl", {"question": "1+1", "answer": "2"})
    return place.fails("data", "prepare", "raw.jsonl", "--out", "out.jsonl")


# Model


def with_model(place: Place, *overrides: str) -> str:
    return place.fails("train", "recipe.yaml", "policy.model_name=model", *overrides)


@trouble
def no_model(place: Place) -> str:
    return place.fails("train", "recipe.yaml", "policy.model_name=Qwen/Qwen2.5-Math-7B")


@trouble
def other_family(place: Place) -> str:
    place.copy_model("model", model_type="gpt_neox")
    return with_model(place)


@trouble
def no_tokenizer(place: Place) -> str:
    for path in place.copy_model("model").glob("*token*"):
        path.unlink()
    return with_model(place)


@trouble
def template_refuses(place: Place) -> str:
    path = place.copy_model("model") / "chat_template.jinja"
    path.write_text("{{ raise_exception('System role not supported') }}")
    return with_model(place)


@trouble
def no_chat_template(place: Place) -> str:
    model = place.copy_model("model")
    for path in model.glob("chat_template*"):
        path.unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with_model(place, "experience.prefill_path=none")
    return place.logged()


@trouble
def no_weights(place: Place) -> str:
    for path in place.copy_model("model").glob("*.safetensors"):
        path.unlink()
    return with_model(place)


@trouble
def too_few_positions(place: Place) -> str:
    place.copy_model("model", max_position_embeddings=20)
    return with_model(place)


@trouble
def heads_not_divided(place: Place) -> str:
    heads = "policy.megatron_cfg.tensor_model_parallel_size=3"
    return place.fails("show", "recipe.yaml", "--world-size", "3", "policy.model_name=Qwen/Qwen2.5-7B-Instruct", heads)


@trouble
def random_weights(place: Place) -> str:
    return place.stopped("train", "recipe.yaml")


# Memory


@trouble
def does_not_fit(place: Place) -> str:
    recipe = ROOT / "recipes" / "llama_3.1_70b_64gpu.yaml"
    memory = "policy.generation.vllm_cfg.gpu_memory_utilization=0.7"
    return place.fails("show", recipe, "--world-size", "64", "--gpu-memory-gib", "80", memory)


@trouble
def out_of_gpu_memory(place: Place) -> str:
    """What CUDA says there is copied from a GPU; that torch raises it cannot be provoked without one."""

    def raises(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.07 GiB "
            "is free. Including non-PyTorch memory, this process has 78.02 GiB memory in use. Of the allocated memory "
            "76.41 GiB is allocated by PyTorch, and 0.92 GiB is reserved by PyTorch but unallocated."
        )

    place.patch.setattr("exgrpo_megatron.trainer.Trainer.fit", raises)
    return place.fails("train", "recipe.yaml", "grpo.val_at_start=false")


@trouble
def disk_full(place: Place) -> str:
    """On the device that is always full."""
    (place.folder / "metrics.jsonl").symlink_to("/dev/full")
    sink = object.__new__(JsonlSink)  # to open it reads what is there, of which this device has no end
    sink.path = Path("metrics.jsonl")
    return error_of(UserError, lambda: sink.write(1, {}))


@trouble
def no_memory_to_compare(place: Place) -> str:
    place.patch.setattr(reference_model.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    found = find_architecture("Qwen/Qwen2.5-Math-7B")
    assert found is not None
    return error_of(CheckpointError, lambda: reference_model.check_memory(found[0]))
