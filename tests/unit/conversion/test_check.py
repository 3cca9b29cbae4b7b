"""`exgrpo convert --check`: planted faults are found, named and explained; what is the same is called so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import tensors_of, tiny_model
from safetensors.torch import load_file, save_file

from exgrpo_conversion._differences import difference
from exgrpo_megatron.cli import main

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1"
GATE, UP = f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"
QUERY, KEY, OUTPUT = (f"{LAYER}.self_attn.{name}_proj.weight" for name in "qko")
MODEL = tiny_model("llama", tied=False, head_dim=2)
"""12 heads of 2 in 4 groups, of a hidden size of 24: the output projection is square."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model as a Hugging Face folder, and converted to a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    MODEL.save_pretrained(folder / "hf")
    (folder / "hf" / "tokenizer.json").write_text('{"vocab": 1, "merges": 2}')
    (folder / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    assert run("convert", folder / "hf", folder / "megatron", "--to", "torch_dist") == 0
    return folder


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


def check(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    capsys.readouterr()
    code = run("convert", "--check", *args)
    out, err = capsys.readouterr()
    return code, out + err


def faulty(models: Path, tmp_path: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the folder with its tensors changed."""
    shutil.copytree(models / "hf", tmp_path / "faulty")
    path = tmp_path / "faulty" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return tmp_path / "faulty"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def row(output: str, name: str) -> str:
    """The line of the table that begins with a name, and the one below it, which may explain."""
    lines = output.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split(" ")[0] == name)
    return "\n".join(lines[at : at + 2])


def test_a_converted_model_is_the_same(models: Path, capsys: pytest.CaptureFixture[str]):
    code, output = check(capsys, models / "hf", models / "megatron")
    assert code == 0
    # 9 tensors in each of 2 layers, embedding, last norm, output layer
    assert "tensors: 21 equal" in output
    assert output.endswith("the same model\n")


def swap(tensors: Tensors, first: str, second: str) -> None:
    tensors[first], tensors[second] = tensors[second], tensors[first]


def reorder_groups(tensors: Tensors) -> None:
    """The 4 key-value groups of 3 query heads of 2 rows in another order."""
    order = torch.tensor([1, 0, 3, 2])
    tensors[QUERY] = tensors[QUERY].unflatten(0, (4, 6))[order].flatten(0, 1)
    tensors[KEY] = tensors[KEY].unflatten(0, (4, 2))[order].flatten(0, 1)


FAULTS: dict[str, tuple[Callable[[Tensors], object], dict[str, str]]] = {
    "swapped gate and up": (
        lambda tensors: swap(tensors, GATE, UP),
        {GATE: f"it is {UP} of the first", UP: f"it is {GATE} of the first"},
    ),
    "a transposed square matrix": (
        lambda tensors: tensors.update({OUTPUT: tensors[OUTPUT].t()}),
        {OUTPUT: "it is the transpose of that of the first"},
    ),
    "groups in another order": (
        reorder_groups,
        {QUERY: "it has the rows in another order", KEY: "it has the rows in another order"},
    ),
    "layers exchanged": (
        lambda tensors: swap(tensors, QUERY, QUERY.replace("layers.1", "layers.0")),
        {QUERY: "it is model.layers.0.self_attn.q_proj.weight of the first"},
    ),
    "NaN": (lambda tensors: tensors[KEY].index_put_((torch.tensor(3),), torch.tensor(float("nan"))), {KEY: "nan"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_explained(
    fault: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change, expected = FAULTS[fault]
    code, output = check(capsys, models / "megatron", faulty(models, tmp_path, change))
    assert code == 1
    for name, hint in expected.items():
        assert "different" in row(output, name)
        assert hint in row(output, name)
    assert output.splitlines()[-1].startswith("not the same model")


def test_one_flipped_bit_is_found_with_its_place(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def flip(tensors: Tensors) -> None:
        tensors[OUTPUT].view(torch.int32)[3, 5] ^= 1

    code, output = check(capsys, models / "megatron", faulty(models, tmp_path, flip), "--json")
    found = json.loads(output)
    assert code == 1
    assert not found["same"]
    (fault,) = [finding for finding in found["tensors"] if finding["verdict"] != "equal"]
    before = tensors_of(MODEL)[OUTPUT][3, 5]
    assert fault["name"] == OUTPUT
    assert fault["second"] == {"shape": [24, 24], "dtype": "float32"}
    assert fault["difference"]["count"] == 1
    assert fault["difference"]["where"] == [3, 5]
    assert fault["difference"]["first"] == float(before)
    assert 0 < fault["difference"]["max_rel"] < 2**-22  # the last of 23 bits of a mantissa


def test_a_missing_shard_is_named_with_a_tensor_of_it(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("convert", models / "hf", tmp_path / "dst", "--max-shard-size", "8KB") == 0
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / "dst" / index[KEY]).unlink()
    code, output = check(capsys, models / "megatron", tmp_path / "dst")
    assert code == 2
    assert f"{index[KEY]} is missing" in output.replace("\n", "")
    assert any(f"places {name} in" in output.replace("\n", "") for name, file in index.items() if file == index[KEY])


def test_a_wrong_tie_is_found(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dst = faulty(models, tmp_path, lambda tensors: tensors.pop(HEAD))
    edit_config(dst, tie_word_embeddings=True)
    code, output = check(capsys, models / "megatron", dst)
    assert code == 1
    assert "missing" in row(output, HEAD)
    assert f"the other side takes it from {EMBEDDING}" in row(output, HEAD)
    assert "different" in row(output, "tied")
    code, output = check(capsys, dst, models / "megatron")
    assert (code, "extra" in row(output, HEAD)) == (1, True)


def test_a_tie_and_a_copy_of_the_embedding_are_the_same_model(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copied = faulty(models, tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    shutil.copytree(copied, tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    code, output = check(capsys, copied, tmp_path / "tied")
    assert code == 0
    assert "20 equal" in output
    assert "1 tied" in output
    assert "changes nothing" in row(output, "tied")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_theta", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
        ("rope_scaling", {"rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
        ("norm_eps", {"rms_norm_eps": 1e-5}),
        ("max_positions", {"max_position_embeddings": 128}),
        ("eos_token_id", {"eos_token_id": 5}),
    ],
)  # fmt: skip
def test_a_stale_config_is_found(
    name: str, changes: dict[str, object], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dst = faulty(models, tmp_path, lambda tensors: None)
    edit_config(dst, **changes)
    code, output = check(capsys, models / "hf", dst)
    assert code == 1
    assert row(output, name).splitlines()[0].endswith("different")
    assert "tensors: 21 equal" in output


def test_other_heads_with_the_same_shapes_are_found(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dst = faulty(models, tmp_path, lambda tensors: None)
    edit_config(dst, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    code, output = check(capsys, models / "hf", dst)
    assert code == 1
    assert all("different" in row(output, name) for name in ("num_heads", "num_kv_heads", "head_dim"))


def test_a_changed_or_lost_tokenizer_is_found_and_json_is_compared_by_value(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dst = faulty(models, tmp_path, lambda tensors: None)
    (dst / "tokenizer.json").write_text('{"merges": 2,\n "vocab": 1}')
    assert check(capsys, models / "hf", dst)[0] == 0
    (dst / "chat_template.jinja").write_text("{{ other }}")
    code, output = check(capsys, models / "hf", dst)
    assert (code, "different" in row(output, "chat_template.jinja")) == (1, True)
    (dst / "chat_template.jinja").unlink()
    code, output = check(capsys, models / "hf", dst)
    assert (code, "missing" in row(output, "chat_template.jinja")) == (1, True)


def test_rounding_to_the_coarser_dtype_is_no_fault_and_one_step_further_is(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("convert", models / "megatron", tmp_path / "half", "--dtype", "bf16") == 0
    code, output = check(capsys, models / "hf", tmp_path / "half")
    assert code == 0
    assert "tensors: 21 rounded" in output
    assert check(capsys, tmp_path / "half", models / "megatron")[0] == 0
    path = tmp_path / "half" / "model.safetensors"
    tensors = load_file(path)
    tensors[KEY].view(torch.int16)[0, 0] += 1
    save_file(tensors, path)
    code, output = check(capsys, models / "hf", tmp_path / "half")
    assert (code, "[0, 0]" in row(output, KEY)) == (1, True)


def test_models_of_other_sizes_have_missing_and_extra_tensors(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dst = faulty(
        models,
        tmp_path,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(LAYER)],
    )
    edit_config(dst, num_hidden_layers=1)
    code, output = check(capsys, models / "megatron", dst)
    assert (code, "tensors: 12 equal, 9 missing" in output) == (1, True)
    code, output = check(capsys, dst, models / "megatron")
    assert (code, "tensors: 12 equal, 9 extra" in output) == (1, True)


def test_values_that_are_no_numbers_are_json_too(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.input_layernorm.weight"][5] = float("nan")
        tensors[f"{LAYER}.mlp.up_proj.weight"][1, 2] = float("-inf")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    code, output = check(capsys, models / "megatron", faulty(models, tmp_path, spoil), "--json")
    found = {it["name"]: it["difference"] for it in json.loads(output, parse_constant=refuse)["tensors"]}
    assert code == 1
    norm, up = found[f"{LAYER}.input_layernorm.weight"], found[f"{LAYER}.mlp.up_proj.weight"]
    assert (norm["second"], norm["where"], norm["max_abs"]) == ("nan", [5], None)
    assert (up["second"], up["where"], up["max_abs"]) == ("-inf", [1, 2], None)


def test_options_for_writing_are_refused(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for option in (["--dtype", "bf16"], ["--to", "hf"], ["--overwrite"]):
        code, output = check(capsys, models / "hf", models / "megatron", *option)
        assert code == 2
        assert f"{option[0]} is for writing" in output
    capsys.readouterr()
    assert run("convert", models / "hf", tmp_path / "dst", "--json") == 2
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, -2.0], [1.0, -2.0], None),
        ([1.0, -2.0, 8.0], [1.0, -3.0, 6.0], (2, 2.0, 0.5, (2,))),  # 1/2 of the second, 2/8 of the third
        ([0.0], [-0.0], (1, 0.0, 0.0, (0,))),  # other bits
        ([0.0, 1.0], [0.5, 1.0], (1, 0.5, None, (0,))),
        ([1.0, 2.0], [1.0, float("nan")], (1, None, None, (1,))),
        ([float("nan")], [float("nan")], None),
        ([float("inf")], [float("inf")], None),
        ([float("inf"), 1.0], [float("inf"), 2.0], (1, 1.0, 1.0, (1,))),
    ],
)
def test_differences_are_counted_measured_and_placed(
    first: list[float], second: list[float], expected: tuple[object, ...] | None
):
    found = difference(torch.tensor(first), torch.tensor(second))
    assert (found and (found.count, found.max_abs, found.max_rel, found.where)) == expected


def test_the_pieces_of_a_large_tensor_add_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("exgrpo_conversion._differences._PIECE", 7)
    first = torch.arange(60.0).view(3, 4, 5)
    second = first.clone()
    second[2, 1, 4] += 0.25
    second[0, 0, 3] -= 2
    found = difference(first, second)
    assert found is not None
    assert (found.count, found.max_abs, found.where, found.second) == (2, 2.0, (0, 0, 3), 1.0)
    assert found.max_rel == pytest.approx(2 / 3)
