"""A real model through Megatron and back: SmolLM2-135M-Instruct, 9 query heads in 3 groups, tied.

Skips, with the reason, where the model's package is absent (`smollm2_model`).
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.formats import open_source

DISTRIBUTED = Path(__file__).resolve().parents[1] / "distributed"
sys.path.insert(0, str(DISTRIBUTED))

from launch import launch  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

LAYOUTS = {"PP2": (2, {"pipeline_model_parallel_size": 2}), "TP3": (3, {"tensor_model_parallel_size": 3})}
"""Number of processes, and how they share the model."""


@pytest.fixture
def scratch(tmp_path):
    """A folder for 1.6 GB, which do not stay."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def expected(model):
    return answers(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_text_are_the_same_after_megatron_had_it(layout, model, expected, scratch):
    """Written for Megatron, loaded by it on the layout, saved by it, and converted back."""
    ranks, megatron_cfg = LAYOUTS[layout]
    folder = scratch / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "hf").symlink_to(model)
    with open_source(model) as source:
        convert(source, Target("torch_dist", folder / "torch_dist"), id)
    layouts = {layout: {"megatron_cfg": megatron_cfg, "saved": ["smollm2"], "formats": ["torch_dist"]}}
    out = scratch / "saved"
    launch(DISTRIBUTED / "run_conversion.py", ranks, [str(scratch / "models"), str(out), json.dumps(layouts)], 900)
    with open_source(out / layout / "smollm2" / "torch_dist", config=model) as source:
        convert(source, Target("hf", scratch / "back"), id)
    assert answers(scratch / "back") == expected


def answers(folder):
    """Logits of a prompt, as bytes, and the greedy text after it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "How much is 7 times 6?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        logits = loaded(**tokens).logits
        text = loaded.generate(**tokens, do_sample=False, max_new_tokens=16)
    return logits.numpy().tobytes(), tokenizer.decode(text[0])
