"""What a recipe gets on a machine: tables of machines that are not this one."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.acceleration import choose, describe
from exgrpo_megatron.accelerators import Accelerators, Library
from exgrpo_megatron.config import MegatronConfig, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.layout import check_layout

CPU = Accelerators(None)
H200 = Accelerators("NVIDIA H200", triton=Library("triton", "3.7.1"))
WITH_ENGINE = replace(
    H200, transformer_engine=Library("transformer-engine", "2.20.2"), fp8_faults={"mxfp8": "needs capability 10.0"}
)
BROKEN = replace(H200, transformer_engine=Library("transformer-engine", "2.20.2", "RuntimeError: empty"))
WITH_APEX = replace(H200, apex=Library("apex", "0.1"), gradient_extension=True)
ENGINE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
FP8 = {"fp8_cfg": {"enabled": True}}


def policy(layout: dict[str, Any] | None = None, precision: str = "bfloat16") -> PolicyConfig:
    return PolicyConfig(model_name="any", precision=precision, megatron_cfg=layout or {})


@pytest.mark.parametrize(
    ("found", "layout", "precision", "layers", "fusions"),
    [
        # Fusions: of RoPE, of the activation, of weight gradients.
        (CPU, {}, "bfloat16", "local", (False, False, False)),
        (H200, {}, "bfloat16", "local", (False, False, False)),
        (BROKEN, {}, "bfloat16", "local", (False, False, False)),
        (WITH_APEX, {}, "bfloat16", "local", (False, False, True)),
        (WITH_ENGINE, {}, "bfloat16", "transformer_engine", (True, True, True)),
        (replace(WITH_ENGINE, triton=Library("triton")), {}, "bfloat16", "transformer_engine", (True, False, True)),
        (WITH_ENGINE, {}, "float32", "local", (False, False, False)),
        (WITH_ENGINE, LOCAL, "bfloat16", "local", (False, False, False)),
        (WITH_ENGINE, {**LOCAL, "apply_rope_fusion": True}, "bfloat16", "local", (True, False, False)),
        (H200, {"bias_activation_fusion": True}, "bfloat16", "local", (False, True, False)),
        (
            WITH_ENGINE,
            {"apply_rope_fusion": False, "bias_activation_fusion": False, "gradient_accumulation_fusion": False},
            "bfloat16",
            "transformer_engine",
            (False, False, False),
        ),
    ],
)
def test_what_works_is_taken(
    found: Accelerators, layout: dict[str, Any], precision: str, layers: str, fusions: tuple[bool, bool, bool]
):
    chosen = choose(policy(layout, precision), found)
    assert chosen.layers == layers
    assert (chosen.rope_fusion.on, chosen.activation_fusion.on, chosen.gradient_fusion.on) == fusions
    assert chosen.fp8 is None


@pytest.mark.parametrize(
    ("found", "layout", "said"),
    [
        (CPU, ENGINE, "transformer_impl = transformer_engine, but there is no CUDA device"),
        (H200, ENGINE, "transformer_impl = transformer_engine, but transformer-engine is not installed"),
        (BROKEN, ENGINE, "transformer-engine 2.20.2 does not work \\(RuntimeError: empty\\)"),
        (CPU, FP8, "fp8_cfg.enabled = true needs Transformer Engine's layers, but there is no CUDA device"),
        (
            WITH_ENGINE,
            {"fp8_cfg": {"enabled": True, "fp8_recipe": "mxfp8"}},
            "fp8_recipe = mxfp8 is not possible on NVIDIA H200: needs capability 10.0",
        ),
        (H200, {"apply_rope_fusion": True}, "apply_rope_fusion = true, but transformer-engine is not installed"),
        (CPU, {"bias_activation_fusion": True}, "bias_activation_fusion = true, but there is no CUDA device"),
        (H200, {"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion = true needs"),
    ],
)
def test_what_is_asked_for_and_does_not_work_is_refused(found: Accelerators, layout: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=f"policy.megatron_cfg.*{said}"):
        choose(policy(layout), found)


@pytest.mark.parametrize(
    ("layout", "precision", "said"),
    [
        (FP8, "float32", "fp8_cfg.enabled = true needs policy.precision = bfloat16"),
        (ENGINE, "float32", "transformer_impl = transformer_engine needs policy.precision = bfloat16"),
        ({**FP8, **LOCAL}, "bfloat16", "fp8_cfg.enabled = true needs Transformer Engine's layers"),
        ({"fp8_cfg": {"fp8_param": True}}, "bfloat16", "fp8_param = true is not supported"),
        ({"fp8_cfg": {"fp8_recipe": "delayed"}}, "bfloat16", "'blockwise', 'tensorwise' or 'mxfp8'"),
        ({"transformer_impl": "inference_optimized"}, "bfloat16", "'auto', 'transformer_engine' or 'local'"),
    ],
)
def test_recipes_that_work_nowhere_are_refused_as_they_are_read(layout: dict[str, Any], precision: str, said: str):
    with pytest.raises(ValidationError, match=said):
        policy(layout, precision)


def test_the_report_says_whose_kernels_are_used():
    said = describe(policy(FP8), WITH_ENGINE)
    assert said["layers"] == "Transformer Engine's (transformer-engine 2.20.2)"
    assert said["FP8"] == "e4m3, blockwise; rows padded to multiples of 128"
    assert said["optimizer"] == "Megatron's, around Transformer Engine's FusedAdam"
    assert said["LM head, loss"] == "exgrpo_kernels, linear form, in Triton"
    assert describe(policy(), CPU)["LM head, loss"] == "exgrpo_kernels, linear form, in torch (no GPU for Triton)"
    broken = replace(H200, triton=Library("triton", "3.7.1", "ImportError: libtriton.so"))
    assert "linear form, in torch (triton 3.7.1" in describe(policy(), broken)["LM head, loss"]
    plain = policy().model_copy(update={"loss_kernel": "reference"})
    assert describe(plain, H200)["LM head, loss"] == "exgrpo_kernels, reference form, in torch"
    assert describe(policy(), WITH_APEX)["optimizer"] == "Megatron's, around apex's FusedAdam"
    assert describe(policy(), replace(WITH_APEX, gpu=None))["optimizer"] == "Megatron's, around torch.optim.AdamW"


@pytest.mark.parametrize(
    ("recipe", "layout", "multiple"),
    [
        # 16 positions on every rank for the product, two of these share a row, and three that.
        ("tensorwise", {}, 16),
        ("mxfp8", {}, 32),
        ("blockwise", {}, 128),
        ("tensorwise", {"context_parallel_size": 2}, 32),
        ("tensorwise", {"context_parallel_size": 2, "tensor_model_parallel_size": 3, "sequence_parallel": True}, 96),
    ],
)
def test_fp8_pads_rows_to_whole_blocks_on_every_rank(recipe: str, layout: dict[str, Any], multiple: int):
    fp8 = {"enabled": True, "fp8_recipe": recipe}
    assert MegatronConfig(fp8_cfg=fp8, **layout).row_multiple == multiple
    assert MegatronConfig(fp8_cfg={**fp8, "enabled": False}).row_multiple == 1


def test_fp8_refuses_a_model_whose_weights_have_odd_sides():
    """Qwen2.5-0.5B on two ranks: 14 heads of 64 and 2 groups are 576 rows of 16 x 36; 4864 / 2 = 16 x 152. With MLP
    size 4880 a rank has 2440 = 16 x 152.5."""
    shape = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    layout = MegatronConfig(tensor_model_parallel_size=2, fp8_cfg={"enabled": True})
    check_layout(Architecture.from_hf_config(shape), layout)
    with pytest.raises(ConfigError, match=r"blockwise takes weights .* multiples of 16 .* intermediate_size is 2440"):
        check_layout(Architecture.from_hf_config({**shape, "intermediate_size": 4880}), layout)
