"""`exgrpo convert` from the command line: a run's checkpoint, a summary, and one clear line for what is wrong."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch
from cli_project import assert_refused, contents
from safetensors.torch import load_file

from exgrpo_conversion import hf_folder


def same(one, other):
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("src", ["run", "run/checkpoints", "run/checkpoints/step_000002"])
def test_a_checkpoint_of_a_run_is_what_the_run_exported(src, exgrpo, trained):
    """The model is embedded: its config is in the run's folder."""
    result = exgrpo("convert", src, "out/hf")
    assert result.code == 0, result
    assert same(trained / "run" / "hf", trained / "out" / "hf")
    for text in ("a checkpoint of a run of this program, qwen2", "in float32", "written to out/hf", "rows of padding"):
        assert text in result.out


def test_a_run_goes_to_megatron_and_back(exgrpo, trained):
    result = exgrpo("convert", "run", "megatron", "--to", "torch_dist", "--make-vocab-size-divisible-by", 32)
    assert result.code == 0, result
    assert "rows of zeros" in result.out
    assert exgrpo("convert", "megatron", "hf").code == 0
    assert same(trained / "run" / "hf", trained / "hf")
    assert (trained / "hf" / "tokenizer.json").exists()


def test_options_reach_the_files(exgrpo, trained):
    result = exgrpo("convert", "run/hf", "hf", "--dtype", "bf16", "--max-shard-size", "0.1MB")
    assert result.code == 0, result
    assert "in bfloat16" in result.out
    shards = list((trained / "hf").glob("model-*.safetensors"))
    largest = max(tensor.nbytes for shard in shards for tensor in load_file(shard).values())
    sizes = [sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in shards]
    assert len(shards) > 2
    assert max(sizes) <= max(100_000, largest)
    assert exgrpo("convert", "run/hf", "hf").code == 2
    assert exgrpo("convert", "run/hf", "hf", "--overwrite").code == 0
    assert same(trained / "run" / "hf", trained / "hf")


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (("nothing", "out"), ("nothing is not a folder",)),
        (("data", "out"), ("no checkpoint: known are",)),
        (("run/hf", "run/hf", "--overwrite"), ("which is read",)),
        (("run/hf", "run"), ("which is read",)),
        (("run/hf", "out", "--dtype", "int8"), ("--dtype int8: one of bf16, fp16, fp32",)),
        (("run/hf", "out", "--max-shard-size", "5 parsecs"), ("--max-shard-size 5 parsecs",)),
        (("run/hf", "out", "--to", "torch_dist", "--tensor-parallel", 3), ("num_key_value_heads",)),
        (("run/hf", "out", "--config", "run/hf"), ("has its own config",)),
        (("run/checkpoints/step_000002/policy", "out"), ("does not hold the config.json", "--config")),
        (("run/checkpoints/step_000003.incomplete", "out"), ("whose writing did not come to its end",)),
        (("run/hf", "run/hf/config.json/out"), ("run/hf cannot be converted", "config.json")),
        (("ranks", "out", "--config", "run/hf"), ("pickles that can run code", "--unpickle")),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(args, texts, exgrpo, trained):
    (trained / "data").mkdir()
    checkpoints = trained / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step_000002", checkpoints / "step_000003.incomplete")
    (trained / "ranks" / "mp_rank_00").mkdir(parents=True)
    torch.save({}, trained / "ranks" / "mp_rank_00" / "model_optim_rng.pt")
    before = contents(trained)
    assert_refused(exgrpo("convert", *args), before, *texts)
    assert not (trained / "out").exists()


@pytest.mark.parametrize("src", ["run", "run/checkpoints/step_000002/policy"])
def test_a_run_of_another_model_than_the_config_is_refused(src, exgrpo, trained):
    shutil.copytree(trained / "run" / "model", trained / "other")
    config = trained / "other" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    before = contents(trained)
    result = exgrpo("convert", src, "out", "--config", "other")
    assert_refused(result, before, "of another model than other", "share_embeddings_and_output_weights = True")


def test_sigterm_leaves_nothing_behind(exgrpo, trained, monkeypatch):
    def stop(*_):
        assert list((trained / "out").glob(".hf.*.partial"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(hf_folder, "copy_side_files", stop)
    result = exgrpo("convert", "run", "out/hf")
    assert result.code == 128 + signal.SIGTERM
    assert not list((trained / "out").iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
