"""Compile every variant of every kernel for compute capability 9.0, and write what came out as JSON; needs no GPU.

Run by test_compiled_for_hopper.py as a process of its own: there the kernels are compiled, not interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from exgrpo_kernels import triton_rows, triton_tokens
from exgrpo_kernels.triton_kernels import ROWS_PER_PROGRAM, TILES, Tile

HOPPER = GPUTarget("cuda", 90, 32)
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = {
    "statistics_kernel": triton_rows.statistics_kernel,
    "gradient_kernel": triton_rows.gradient_kernel,
    "loss_kernel": triton_tokens.loss_kernel,
    "merge_kernel": triton_tokens.merge_kernel,
}
POINTERS = ("logits", "targets", "statistics", "coefficients")
OBJECTIVES = {
    "nll": {"NLL": True, "CLIP": True, "SHAPING": "ratio"},
    "clip and shaping": {"NLL": False, "CLIP": True, "SHAPING": "ratio"},
    "clip": {"NLL": False, "CLIP": True, "SHAPING": "none"},
    "shaping": {"NLL": False, "CLIP": False, "SHAPING": "ratio"},
    "ratio": {"NLL": False, "CLIP": False, "SHAPING": "none"},
    "square root": {"NLL": False, "CLIP": True, "SHAPING": "sqrt"},
    "replayed clipped": {"NLL": False, "CLIP": False, "SHAPING": "clip"},
    "log-prob": {"NLL": False, "CLIP": True, "SHAPING": "log_prob"},
}


@dataclass(frozen=True)
class Variant:
    """One kernel as a launcher asks for it."""

    name: str
    kernel: str
    types: dict[str, str]
    """Of run-time arguments."""
    constants: dict[str, Any]
    multiples_of_16: tuple[str, ...] = ()
    num_warps: int = 4
    vectors: int = 0
    """16-byte loads of a thread under way in a loop over whole tiles; 0 where loads cannot be that wide."""


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of a variant."""

    name: str
    kernel: str
    num_warps: int
    vectors: int
    registers: int
    stack_bytes: int
    local_bytes: int
    wide_loads: int
    wide_stores: int
    shuffles: int
    row_offset_is_64_bits: bool


def variants() -> Iterator[Variant]:
    """All that `triton_kernels` can launch, but for the type of targets."""
    for dtype in ITEM_SIZES:
        for tile in TILES:
            for aligned in (True, False) if tile is TILES[-1] else (True,):
                yield _statistics(dtype, tile, aligned)
                yield _gradient(dtype, tile, aligned)
    for name, objective in OBJECTIVES.items():
        for has_entropy in (True, False):
            for ranks in (1, 8):
                yield _loss(name, objective, has_entropy, ranks)
    for has_gradients, has_entropy in ((False, False), (True, False), (True, True)):
        yield _merge(has_gradients, has_entropy)


def _statistics(dtype: str, tile: Tile, aligned: bool) -> Variant:
    types = {
        "logits": f"*{dtype}", "targets": "*i64", "statistics": "*fp32", "row_stride": "i32", "vocab_start": "i32",
        "valid": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "column_stride": 1, "VECTORS": tile.vectors, "LANES": 32 * tile.num_warps, "WIDTH": 16 // ITEM_SIZES[dtype]
    }  # fmt: skip
    return _of_rows("statistics_kernel", dtype, tile, aligned, types, constants)


def _gradient(dtype: str, tile: Tile, aligned: bool) -> Variant:
    types = {
        "logits": f"*{dtype}", "targets": "*i64", "coefficients": "*fp32", "num_rows": "i32", "row_stride": "i32",
        "vocab_start": "i32", "valid": "i32", "num_columns": "i32", "scale": "fp32",
    }  # fmt: skip
    columns = tile.columns(ITEM_SIZES[dtype])
    constants = {"column_stride": 1, "TILE": columns, "TAIL": columns // tile.vectors}
    return _of_rows("gradient_kernel", dtype, tile, aligned, types, constants)


def _of_rows(
    kernel: str,
    dtype: str,
    tile: Tile,
    aligned: bool,
    types: dict[str, str],
    constants: dict[str, Any],
) -> Variant:
    pointers = tuple(name for name in types if name in POINTERS)
    return Variant(
        name=f"{kernel}, {dtype}, {tile}, {'aligned' if aligned else 'unaligned'}",
        kernel=kernel,
        types=types,
        constants=constants,
        multiples_of_16=(*pointers, "row_stride") if aligned else pointers,
        num_warps=tile.num_warps,
        vectors=tile.vectors if aligned else 0,
    )


def _loss(name: str, objective: dict[str, bool | str], has_entropy: bool, ranks: int) -> Variant:
    floats = ("old_logprobs", "advantages", "policy_weights", "logprobs", "entropies", "log_ratios", "losses")
    scalars = (
        "inverse_temperature", "scale", "clip_low", "clip_high", "shaping_beta", "shaping_factor", "max_abs_log_ratio"
    )  # fmt: skip
    types = dict.fromkeys(("statistics", *floats, "coefficients"), "*fp32")
    types |= dict.fromkeys(("replayed", "clipped", "clamped"), "*u8") | dict.fromkeys(scalars, "fp32")
    types |= {"num_rows": "i32"}
    constants = {**objective, "HAS_ENTROPY": has_entropy, "ROWS": ROWS_PER_PROGRAM}
    types, constants = _optional(types, constants, "entropy_weights", "*fp32", None if has_entropy else "None")
    types, constants = _optional(types, constants, "num_ranks", "i32", None if ranks > 1 else 1)
    return Variant(f"loss_kernel, {name}, entropy {has_entropy}, {ranks} ranks", "loss_kernel", types, constants)


def _merge(has_gradients: bool, has_entropy: bool) -> Variant:
    types = {
        "statistics": "*fp32", "num_ranks": "i32", "num_rows": "i32", "inverse_temperature": "fp32", "scale": "fp32"
    }  # fmt: skip
    constants = {"HAS_GRADIENTS": has_gradients, "HAS_ENTROPY": has_entropy, "ROWS": ROWS_PER_PROGRAM}
    given = {
        "logprob_gradients": has_gradients, "entropy_gradients": has_entropy, "coefficients": has_gradients,
        "logprobs": not has_gradients, "entropies": not has_gradients,
    }  # fmt: skip
    for name, is_given in given.items():
        types, constants = _optional(types, constants, name, "*fp32", None if is_given else "None")
    name = f"merge_kernel, gradients {has_gradients}, entropy {has_entropy}"
    return Variant(name, "merge_kernel", types, constants)


def _optional(
    types: dict[str, str], constants: dict[str, Any], name: str, kind: str, constant: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """With `name` as an argument of type `kind`, or as a constant; the text "None" stands for the constant None."""
    if constant is None:
        return types | {name: kind}, constants
    return types, constants | {name: None if constant == "None" else constant}


def compiled(variant: Variant) -> Compiled:
    kernel = KERNELS[variant.kernel]
    order = {name: position for position, name in enumerate(kernel.arg_names)}
    signature = {name: variant.types.get(name, "constexpr") for name in order}
    missing = set(order) - set(variant.types) - set(variant.constants)
    assert not missing, f"{variant.name}: {missing} are neither typed nor constant"
    attributes = {(order[name],): [["tt.divisibility", 16]] for name in variant.multiples_of_16}
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=attributes)
    result = triton.compile(source, target=HOPPER, options={"num_warps": variant.num_warps})
    ptx = result.asm["ptx"]
    return Compiled(
        name=variant.name,
        kernel=variant.kernel,
        num_warps=variant.num_warps,
        vectors=variant.vectors,
        **_resources(result.asm["cubin"]),
        wide_loads=len(re.findall(r"ld\.global\S*\.v4", ptx)),
        wide_stores=len(re.findall(r"st\.global\S*\.v4", ptx)),
        shuffles=len(re.findall(r"shfl\.sync", ptx)),
        row_offset_is_64_bits=re.search(r"arith\.muli %row\S*, %\S+ : i64", result.asm["ttir"]) is not None,
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """As the CUDA tool that comes with Triton reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report.stdout + report.stderr)
    assert found is not None, report.stdout + report.stderr
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack_bytes": stack, "local_bytes": local}


if __name__ == "__main__":
    json.dump([asdict(compiled(variant)) for variant in variants()], sys.stdout)
