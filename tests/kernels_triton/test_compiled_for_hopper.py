"""Every variant the launchers can ask for compiles for Hopper, without spills and with the loads it was written for.

No GPU is needed: Triton brings the assembler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import needs_triton

pytestmark = needs_triton

REGISTERS = 65536
"""Of a multiprocessor; they are given to programs by the thread."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """See compile_for_hopper.Compiled. From a cache of its own, so that everything is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_all_kernels_are_there(compiled):
    """3 types x (3 tiles + the smallest unaligned) x 2 kernels; 8 objectives x 2 x 2; 3 ways to merge."""
    assert len(compiled) == 24 + 32 + 3


def test_nothing_is_spilled(compiled):
    spilled = [variant["name"] for variant in compiled if variant["stack_bytes"] or variant["local_bytes"]]
    assert not spilled


def test_four_programs_of_eight_warps_or_eight_of_four_fit_a_multiprocessor(compiled):
    """Then 32 warps are there to hide the latency of memory, each with its loads under way."""
    warps = {
        variant["name"]: REGISTERS // (32 * variant["registers"] * variant["num_warps"]) * variant["num_warps"]
        for variant in compiled
    }
    assert min(warps.values()) >= 32, warps


def test_aligned_rows_are_read_and_written_16_bytes_at_a_time(compiled):
    """One load a vector in the loop over whole tiles, and one in the loop over the rest; stores also in the padding."""
    aligned = [variant for variant in compiled if variant["vectors"]]
    assert len(aligned) == 18
    for variant in aligned:
        assert variant["wide_loads"] == variant["vectors"] + 1, variant
        stores = variant["vectors"] + 2 if variant["kernel"] == "gradient_kernel" else 0
        assert variant["wide_stores"] == stores, variant


def test_threads_exchange_nothing_before_the_end_of_a_row(compiled):
    """Four sums or maxima over lanes, and over the warps of a program: 5 + log2(warps) exchanges each, at most 36.

    Reductions inside the loop over tiles would come on top of that, once for each vector or more.
    """
    for variant in compiled:
        if variant["kernel"] == "statistics_kernel" and variant["vectors"]:
            assert variant["shuffles"] <= 36, variant


def test_rows_are_found_by_64_bit_arithmetic(compiled):
    """rows * stride passes 2^31 from 14,135 rows of 151,936 columns on."""
    assert all(variant["row_offset_is_64_bits"] for variant in compiled if variant["vectors"])
