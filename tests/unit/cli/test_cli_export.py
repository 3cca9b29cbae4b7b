"""`exgrpo export`: what it writes, what it compares, and faults planted on the way, each caught and named."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from cli_project import assert_refused, contents
from safetensors.torch import load_file, save_file

from exgrpo_conversion.hf_folder import HFReader
from exgrpo_conversion.megatron_source import MegatronSource
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.policy import export, reference_model

LAYER = "model.layers.0"


def tensors(folder):
    with HFReader(folder) as reader:
        return {name: reader.get(name) for name in reader.names()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_newest_checkpoint_is_exported_as_the_run_does_at_its_end(exgrpo, trained):
    left = trained / "run" / ".hf-step_000002.0123abcd.unverified" / "hf-step_000002"  # by an export that was killed
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    result = exgrpo("export", "run")
    assert result.code == 0, result.err
    found = re.search(r"log-probs within (\S+) of those of the checkpoint in Megatron-Core", result.out)
    assert float(found[1]) <= 1e-4
    assert "397,056 parameters in float32; the same tokenizer; every tensor bit for bit as trained" in result.out
    folder = trained / "run" / "hf-step_000002"
    assert equal(tensors(folder), tensors(trained / "run" / "hf"))
    assert {path.name for path in folder.iterdir()} == {path.name for path in (trained / "run" / "hf").iterdir()}
    assert not list((trained / "run").glob(".hf*"))


def test_a_step_a_dtype_and_a_place_can_be_chosen(exgrpo, trained):
    result = exgrpo("export", "run", "--step", 1, "--dtype", "bf16", "--out", "models/mine")
    assert result.code == 0, result.err
    rounding = re.search(r"rounding to bfloat16 moved log-probs by up to (\S+) nats", result.out)
    card = (trained / "models" / "mine" / "README.md").read_text()
    assert "397,056 parameters in bfloat16; the same tokenizer; every tensor bit for bit as trained, rounded to" in card
    assert 0 < float(rounding[1]) < 0.1  # 8 bits of mantissa: 2^-8 relative on logits of about 3
    exported = tensors(trained / "models" / "mine")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert exgrpo("export", "run", "--step", 1, "--verify", "tensors").code == 0
    exact = tensors(trained / "run" / "hf-step_000001")
    assert equal(exported, {name: tensor.bfloat16() for name, tensor in exact.items()})
    assert not equal(exact, tensors(trained / "run" / "hf"))
    assert json.loads((trained / "models" / "mine" / "config.json").read_text())["dtype"] == "bfloat16"
    again = exgrpo("export", "run", "--step", 2, "--out", "models/mine")
    assert again.code == 2
    assert (
        "--out models/mine: a model is there already; choose another folder, or replace it (--overwrite)" in again.err
    )
    assert equal(tensors(trained / "models" / "mine"), exported)
    assert exgrpo("export", "run", "--step", 1, "--out", "models/mine", "--verify", "tensors", "--overwrite").code == 0
    assert equal(tensors(trained / "models" / "mine"), exact)


def test_the_card_has_recipe_variant_pass_rates_and_data(exgrpo, trained):
    assert exgrpo("eval", "recipe.yaml", "--checkpoint", "run/checkpoints/step_000002").code == 0
    assert exgrpo("export", "run", "--verify", "tensors").code == 0
    card = (trained / "run" / "hf-step_000002" / "README.md").read_text()
    assert "# embedded:chain-qwen2, after 2 steps of ExGRPO" in card
    metrics = read_metrics(trained / "run" / "metrics.jsonl")
    rates = [record["validation/pass_rate_t1"] for record in metrics if record["step"] in (0, 2)]
    again = json.loads((trained / "run" / "eval" / "step_000002.json").read_text())["metrics"]
    shown = [f"{rate:.1%}" for rate in (*rates, again["validation/pass_rate_t1"])]
    assert f"| all | {' | '.join(shown)} |" in card.replace(" | 0.0% | 0.0% | 0.0% |\n", " |\n", 1)
    digest = hashlib.sha256((trained / "train.jsonl").read_bytes()).hexdigest()
    fingerprint = json.loads((trained / "run/checkpoints/step_000002/state.json").read_text())["data_fingerprint"]
    assert f"| train | train.jsonl | 4 | 0 | {digest} | `{fingerprint}` |" in card
    assert "| `experience.bucket_weight` | counts | paper: accuracy |" in card
    assert "| optimiser steps in all | 2 |" in card
    assert "num_prompts_per_step: 2" in card
    assert "torch 2." in card


def test_a_moved_run_and_a_checkpoint_of_before_the_record_of_questions_are_exported(exgrpo, trained):
    shutil.move(trained / "run", trained / "elsewhere")
    path = trained / "elsewhere" / "checkpoints" / "step_000002" / "state.json"
    state = json.loads(path.read_text())
    del state["data"]
    path.write_text(json.dumps(state))
    files = path.with_name("files.json")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    files.write_text(json.dumps(json.loads(files.read_text()) | {path.name: digest}))
    result = exgrpo("export", "elsewhere", "--verify", "tensors")
    assert result.code == 0, result.err
    card = (trained / "elsewhere" / "hf-step_000002" / "README.md").read_text()
    assert f"| train | not recorded | - | - | - | `{state['data_fingerprint']}` |" in card


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (["nowhere"], ["nowhere: no folder of a run"]),
        (["run/checkpoints/step_000001"], ["a checkpoint of a run", "export run --step 1"]),
        (["run", "--step", 7], ["no checkpoint of step 7", "step_000001, step_000002"]),
        (["run", "--step", 1, "--best"], ["--best and --step 1"]),
        (["run", "--out", "run/hf"], ["--out run/hf", "choose another"]),
        (["run", "--out", "."], ["would replace the source model"]),
        (["run", "--out", "run/checkpoints"], ["no model folder"]),
        (["run", "--out", "clone"], ["--out clone: a model is there already", "--overwrite"]),
        (["run", "--out", "clone", "--overwrite"], ["clone", "more than an export (.git)"]),
        (["run", "--out", "run/model"], ["would replace the source model"]),
        (["run", "--model", "none"], ["no folder none", "--model"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if value and value[0] in ("run", "nowhere") else "",
)
def test_what_cannot_be_exported_is_refused(exgrpo, trained, args, texts):
    shutil.copytree(trained / "run" / "hf", trained / "clone")
    (trained / "clone" / ".git").mkdir()
    assert_refused(exgrpo("export", *args), contents(trained), *texts)
    assert not (trained / "run" / "hf-step_000002").exists()


def test_a_damaged_checkpoint_is_named(exgrpo, trained):
    path = trained / "run" / "checkpoints" / "step_000002" / "policy" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    assert_refused(exgrpo("export", "run"), contents(trained), "policy/__0_0.distcp is not as it was saved")


def test_a_model_too_large_for_the_memory_is_refused_before_anything_is_written(exgrpo, trained, monkeypatch):
    monkeypatch.setattr(reference_model, "_MARGIN", 1e9)
    assert_refused(exgrpo("export", "run"), contents(trained), "GiB of memory", "--verify tensors")


# ---------------------------------------------------------------- planted faults


def change_tensors(folder, change):
    """In the single file of a small model."""
    path = folder / "model.safetensors"
    found = load_file(path)
    change(found)
    save_file(found, path, {"format": "pt"})


def swap_gate_and_up(found):
    gate, up = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    found[gate], found[up] = found[up], found[gate]


def transpose_output_projection(found):
    name = f"{LAYER}.self_attn.o_proj.weight"
    assert found[name].shape[0] == found[name].shape[1]
    found[name] = found[name].T.contiguous()


def change_config(folder, change):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def remove_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


IN_FOLDER = {
    "swapped gate and up": (
        lambda folder: change_tensors(folder, swap_gate_and_up), f"tensor {LAYER}.mlp.gate_proj.weight differs"),
    "transposed square o_proj": (
        lambda folder: change_tensors(folder, transpose_output_projection),
        f"tensor {LAYER}.self_attn.o_proj.weight differs"),
    "missing shard": (remove_shard, "model-00002-of-00003.safetensors is missing"),
    "wrong tie flag": (
        lambda folder: change_config(folder, lambda settings: settings.update(tie_word_embeddings=False)),
        "config.json is not of the model that was trained: tied = False, trained with True"),
    "stale rope theta": (
        lambda folder: change_config(folder, lambda settings: settings["rope_parameters"].update(rope_theta=5e5)),
        "config.json is not of the model that was trained: rope_theta = 500000.0, trained with 10000.0"),
}  # fmt: skip


@pytest.mark.parametrize("verify", ["logits", "tensors"])
@pytest.mark.parametrize("fault", IN_FOLDER)
def test_a_fault_in_the_written_folder_is_caught_and_named(exgrpo, trained, monkeypatch, fault, verify):
    plant, message = IN_FOLDER[fault]
    really_write = export.write_hf_folder

    def write(dst, weights, **options):
        shard_bytes = 600_000 if fault == "missing shard" else options.pop("max_shard_bytes")
        files = really_write(dst, weights, **{**options, "max_shard_bytes": shard_bytes})
        plant(dst)
        return files

    monkeypatch.setattr(export, "write_hf_folder", write)
    assert_refused(exgrpo("export", "run", "--verify", verify), contents(trained), "cannot export the model", message)
    assert not list((trained / "run").glob("*hf-*"))


IN_MAPPING = {
    swap_gate_and_up: f"not as trained: {LAYER}.mlp.gate_proj.weight, {LAYER}.mlp.up_proj.weight",
    transpose_output_projection: f"not as trained: {LAYER}.self_attn.o_proj.weight",
}


@pytest.mark.parametrize("fault", IN_MAPPING, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_mapping_is_caught_by_log_probs_and_named(exgrpo, trained, monkeypatch, fault):
    """It is there whenever the checkpoint is read by the mapping, so that comparing tensors does not show it."""
    really_read = MegatronSource.tensors

    def faulty(source):
        found = dict(really_read(source))
        fault(found)
        return iter(found.items())

    monkeypatch.setattr(MegatronSource, "tensors", faulty)
    message = "its log-probs differ from those of the checkpoint in Megatron-Core by up to"
    assert_refused(exgrpo("export", "run"), contents(trained), message, IN_MAPPING[fault])
