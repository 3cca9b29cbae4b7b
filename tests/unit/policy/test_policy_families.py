"""Logits of Megatron-Core's model against transformers, for every family and tied and untied embeddings.

No matrix is square, heads are not hidden size / heads wide, and three query heads share a key-value head: a transposed
matrix or a wrong order of rows cannot hide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.families import FAMILIES
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.policy import backend
from exgrpo_megatron.policy.distributed import DataParallel
from exgrpo_megatron.policy.model import load_model

ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # 6 * 16 = 96 is not 24
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SIZES, **more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SIZES, **more)),
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, **more)),
    "llama3": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, **more)),
    "mistral": lambda **more: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None, **more)),
}


def save(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """With no weight at its initial value."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.eval().save_pretrained(folder)
    return model


@torch.no_grad()
def logits_of_both(model: PreTrainedModel, folder: Path, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Megatron's model and of transformers', [positions, vocabulary]."""
    backend.install()
    (chunk,), arch = load_model(folder, PolicyConfig(model_name=str(folder), max_total_sequence_length=positions))
    tokens = torch.randint(0, arch.vocab_size, (1, positions), generator=torch.Generator().manual_seed(1))
    hidden = chunk(tokens, None, None, loss_mask=torch.ones_like(tokens, dtype=torch.bool))
    logits = hidden.squeeze(0) @ chunk.output_weight.t()
    return logits[:, : arch.vocab_size], model(input_ids=tokens).logits[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers(family: str, tied: bool, tmp_path: Path, group: DataParallel) -> None:
    torch.manual_seed(0)
    model = save(MODELS[family](tie_word_embeddings=tied), tmp_path)
    mine, its = logits_of_both(model, tmp_path, 32)
    assert float(its.abs().max()) > 1
    torch.testing.assert_close(mine, its, atol=2e-5, rtol=1e-5)


def test_every_family_is_compared() -> None:
    assert {config_type(make) for make in MODELS.values()} == set(FAMILIES)


def config_type(make: Callable[..., PreTrainedModel]) -> str:
    return make().config.model_type


def test_llama3_scaling_is_exact_where_it_matters(tmp_path: Path, group: DataParallel) -> None:
    """At 400 positions a model without the scaling answers otherwise by far more than the tolerance."""
    torch.manual_seed(0)
    model = save(MODELS["llama3"](tie_word_embeddings=False), tmp_path / "scaled")
    mine, its = logits_of_both(model, tmp_path / "scaled", 400)
    torch.testing.assert_close(mine, its, atol=5e-5, rtol=1e-5)
    config = json.loads((tmp_path / "scaled" / "config.json").read_text())
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    assert config["rope_parameters"]["rope_type"] == "llama3"
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 41, (1, 400), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert float((plain.eval()(input_ids=tokens).logits[0] - its).abs().max()) > 0.01


def test_the_family_that_the_documentation_adds_computes_what_transformers_computes(
    tmp_path: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example under "Adding a family", as it stands there."""
    text = (ROOT / "docs" / "conversion.md").read_text().split("### Adding a family")[1]
    namespace: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], namespace)  # type: ignore[index]
    family = namespace["SEED_OSS"]
    monkeypatch.setitem(FAMILIES, family.model_type, family)
    torch.manual_seed(0)
    model = save(SeedOssForCausalLM(SeedOssConfig(**SIZES)), tmp_path)
    mine, its = logits_of_both(model, tmp_path, 32)
    torch.testing.assert_close(mine, its, atol=2e-5, rtol=1e-5)
    arch = Architecture.from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    assert (arch.family, arch.qkv_bias, arch.head_dim) == ("seed_oss", True, 16)
