"""What the actor computes with: the recipe's wishes and what works on this machine, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exgrpo_megatron.accelerators import GRADIENT_EXTENSION, OLDEST_TRANSFORMER_ENGINE, Accelerators
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.errors import ConfigError

Layers = Literal["transformer_engine", "local"]


@dataclass(frozen=True)
class Switch:
    """A fusion, and why it is on or off."""

    on: bool
    why: str

    def describe(self) -> str:
        return f"{'on' if self.on else 'off'} ({self.why})"


@dataclass(frozen=True)
class Acceleration:
    """What a recipe gets on a machine."""

    layers: Layers
    """Whose layers make up the decoder, in the words of Megatron's `transformer_impl`."""
    why_layers: str
    rope_fusion: Switch
    activation_fusion: Switch
    gradient_fusion: Switch
    fp8: str | None
    """What FP8 is computed in the layers; None: none."""


def choose(policy: PolicyConfig, found: Accelerators) -> Acceleration:
    """What `policy.megatron_cfg` gets where there is what was `found`; a key that is null or auto takes what works.

    Raises:
        ConfigError: a key asks for what does not work here.
    """
    layers, why = _layers(policy, found)
    return Acceleration(
        layers=layers,
        why_layers=why,
        rope_fusion=_rope_fusion(policy, found, layers),
        activation_fusion=_activation_fusion(policy, found, layers),
        gradient_fusion=_gradient_fusion(policy, found, layers),
        fp8=_fp8(policy, found, layers, why),
    )


def describe(policy: PolicyConfig, found: Accelerators) -> dict[str, str]:
    """What `choose` decides, and what else of a step depends on the machine, by subject."""
    chosen = choose(policy, found)
    attention = (
        "Transformer Engine's (flash or cuDNN)"
        if chosen.layers == "transformer_engine"
        else "torch's scaled_dot_product_attention"
    )
    return {
        "layers": f"{_LAYER_NAMES[chosen.layers]} ({chosen.why_layers})",
        "attention": attention,
        "LM head, loss": _loss(policy, found),
        "FP8": chosen.fp8 or "off (policy.megatron_cfg.fp8_cfg.enabled = false)",
        "fused RoPE": chosen.rope_fusion.describe(),
        "fused SwiGLU": chosen.activation_fusion.describe(),
        "fused dW": chosen.gradient_fusion.describe(),
        "optimizer": f"Megatron's, around {_of(found, 'FusedAdam') or 'torch.optim.AdamW'}",
        "norms, clips": f"{_of(found, 'multi-tensor kernels') or 'one tensor after the other, in torch'}",
    }


_LAYER_NAMES = {"transformer_engine": "Transformer Engine's", "local": "Megatron's own"}
_KEY = "policy.megatron_cfg"


def _of(found: Accelerators, what: str) -> str | None:
    """Whose Megatron takes, in its order: Transformer Engine's, then apex's."""
    if found.gpu is None:
        return None
    libraries = (("Transformer Engine", found.transformer_engine), ("apex", found.apex))
    return next((f"{name}'s {what}" for name, library in libraries if library.works), None)


def _triton_runs(found: Accelerators) -> bool:
    return found.gpu is not None and found.triton.works


def _loss(policy: PolicyConfig, found: Accelerators) -> str:
    """As `exgrpo_kernels.dispatch` chooses; the reference is torch everywhere."""
    form = "linear" if policy.loss_kernel == "auto" else policy.loss_kernel
    if form == "reference":
        return "exgrpo_kernels, reference form, in torch"
    if _triton_runs(found):
        return f"exgrpo_kernels, {form} form, in Triton"
    obstacle = "no GPU for Triton" if found.gpu is None else found.triton.describe()
    return f"exgrpo_kernels, {form} form, in torch ({obstacle})"


def _no_transformer_engine(found: Accelerators) -> str | None:
    """Why nothing of Transformer Engine can be used here; None: it can."""
    if found.gpu is None:
        return "there is no CUDA device that torch can use"
    return None if found.transformer_engine.works else found.transformer_engine.describe()


def _layers(policy: PolicyConfig, found: Accelerators) -> tuple[Layers, str]:
    wanted = policy.megatron_cfg.transformer_impl
    if wanted == "local":
        return "local", f"{_KEY}.transformer_impl = local"
    obstacle = _no_transformer_engine(found)
    if obstacle is None and policy.precision == "float32":
        obstacle = "policy.precision = float32, for which its attention has no fused kernel"
    if obstacle is None:
        return "transformer_engine", found.transformer_engine.describe()
    if wanted == "transformer_engine":
        oldest = ".".join(map(str, OLDEST_TRANSFORMER_ENGINE))
        raise ConfigError(
            f"{_KEY}.transformer_impl = transformer_engine, but {obstacle}: it needs a CUDA device, transformer-engine "
            f"{oldest} or newer with its torch part (exgrpo doctor says what is there) and policy.precision = "
            "bfloat16; or set it to auto or local"
        )
    return "local", obstacle


def _rope_fusion(policy: PolicyConfig, found: Accelerators, layers: Layers) -> Switch:
    wanted = policy.megatron_cfg.apply_rope_fusion
    obstacle = _no_transformer_engine(found)
    if wanted and obstacle is not None:
        raise ConfigError(
            f"{_KEY}.apply_rope_fusion = true, but {obstacle}: the kernel is Transformer Engine's; set it to null or "
            "false"
        )
    return _switch("apply_rope_fusion", wanted, automatic=layers == "transformer_engine", of="Transformer Engine's")


def _activation_fusion(policy: PolicyConfig, found: Accelerators, layers: Layers) -> Switch:
    wanted = policy.megatron_cfg.bias_activation_fusion
    obstacle = "there is no CUDA device that torch can use" if found.gpu is None else found.triton.describe()
    compiles = _triton_runs(found)
    if wanted and not compiles:
        raise ConfigError(
            f"{_KEY}.bias_activation_fusion = true, but {obstacle}: torch compiles it for the GPU with triton; set it "
            "to null or false"
        )
    automatic = layers == "transformer_engine" and compiles
    return _switch("bias_activation_fusion", wanted, automatic=automatic, of="compiled")


def _gradient_fusion(policy: PolicyConfig, found: Accelerators, layers: Layers) -> Switch:
    wanted = policy.megatron_cfg.gradient_accumulation_fusion
    extension = found.gpu is not None and found.gradient_extension
    possible = layers == "transformer_engine" or extension
    if wanted and not possible:
        raise ConfigError(
            f"{_KEY}.gradient_accumulation_fusion = true needs Transformer Engine's layers, or apex's module "
            f"{GRADIENT_EXTENSION} and a CUDA device, and neither is here: set it to null or false"
        )
    of = "Transformer Engine's" if layers == "transformer_engine" else "apex's"
    return _switch("gradient_accumulation_fusion", wanted, automatic=possible, of=of)


def _switch(name: str, wanted: bool | None, *, automatic: bool, of: str) -> Switch:
    on = automatic if wanted is None else wanted
    if wanted is None:
        return Switch(on, of if on else "what it needs is not in use")
    return Switch(on, f"{_KEY}.{name} = {str(wanted).lower()}" + (f", {of}" if on else ""))


def _fp8(policy: PolicyConfig, found: Accelerators, layers: Layers, why: str) -> str | None:
    fp8 = policy.megatron_cfg.fp8_cfg
    if not fp8.enabled:
        return None
    if layers != "transformer_engine":
        raise ConfigError(
            f"{_KEY}.fp8_cfg.enabled = true needs Transformer Engine's layers, but {why}: set it to false"
        )
    fault = found.fp8_faults.get(fp8.fp8_recipe)
    if fault is not None:
        raise ConfigError(f"{_KEY}.fp8_cfg.fp8_recipe = {fp8.fp8_recipe} is not possible on {found.gpu}: {fault}")
    return f"{fp8.fp8}, {fp8.fp8_recipe}; rows padded to multiples of {policy.megatron_cfg.row_multiple}"
