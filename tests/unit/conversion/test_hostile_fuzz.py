"""Hundreds of damaged checkpoints: each is read or refused in bounded memory and time, and nothing is written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import tiny_model
from hostile_files import damage, damaged_bytes, damaged_header, damaged_json

from exgrpo_conversion.architecture import UnsupportedModelError
from exgrpo_conversion.convert import Target, convert
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.formats import open_source

MEMORY_BYTES = 400 * 2**20
"""More than the process has when it begins: JSON of 16 MB may take 20 times its size."""

TIME_S = 20
"""For one file; none takes a tenth of a second on an idle machine."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in every format that is fuzzed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = tiny_model("llama", tied=False)
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    torch.save(model.state_dict(), folder / "weights.bin")
    shutil.copytree(folder / "single", folder / "bin")
    (folder / "bin" / "model.safetensors").unlink()
    (folder / "weights.bin").rename(folder / "bin" / "pytorch_model.bin")
    for made in ("torch_dist", "nemo2"):
        with open_source(folder / "single") as source:
            convert(source, Target(made, folder / made), lambda _: None)
    return folder


CASES: dict[str, tuple[str, str, list[Callable[..., bytes]], int]] = {
    "safetensors header": ("single", "model.safetensors", [damaged_header], 150),
    "safetensors bytes": ("single", "model.safetensors", [lambda it, chance: _front(it, chance, 3000)], 60),
    "index": ("sharded", "model.safetensors.index.json", [damaged_json, damaged_bytes], 120),
    "config": ("single", "config.json", [damaged_json, damaged_bytes], 150),
    "metadata": ("torch_dist", "release/.metadata", [damaged_bytes], 250),
    "tensors": ("torch_dist", "release/__0_0.distcp", [damaged_bytes, lambda it, chance: _front(it, chance, 900)], 60),
    "common": ("torch_dist", "release/common.pt", [damaged_bytes], 60),
    "tracker": ("torch_dist", "latest_checkpointed_iteration.txt", [damaged_bytes], 20),
    "bin": ("bin", "pytorch_model.bin", [damaged_bytes, lambda it, chance: _front(it, chance, 3000)], 40),
}


def _front(content: bytes, chance: Any, size: int) -> bytes:
    """Damage in the first bytes, where a file says what is in it."""
    return damaged_bytes(content[:size], chance) + content[size:]


@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_read_or_refused(case: str, checkpoints: Path, tmp_path: Path):
    checkpoint, file, kinds, count = CASES[case]
    shutil.copytree(checkpoints / checkpoint, tmp_path / "ck")
    whole = (tmp_path / "ck" / file).read_bytes()

    def attempt(seed: int) -> str:
        (tmp_path / "ck" / file).write_bytes(whole)
        damage(tmp_path / "ck" / file, kinds, seed)
        return outcome(tmp_path / "ck")

    outcomes = in_small_child(attempt, count, tmp_path)
    assert outcomes["refused"] > count // 20
    assert outcomes.keys() <= {"refused", "read"}, json.dumps(outcomes, indent=1)


def outcome(folder: Path) -> str:
    """Open a checkpoint and read all of it; anything but an error of ours is one of the program."""
    opened_for_writing.clear()
    try:
        with open_source(folder) as source:
            for _, tensor in source.tensors():
                tensor.flatten()[-1:].clone()
    except (ModelFolderError, UnsupportedModelError) as error:
        return "refused" if len(str(error)) < 20_000 else f"a message of {len(str(error))} characters"
    except BaseException:  # noqa: BLE001 (it is what the test reports)
        return traceback.format_exc()
    return f"wrote {opened_for_writing}" if opened_for_writing else "read"


opened_for_writing: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: what could change a file or leave the process."""
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        opened_for_writing.append(str(args[0]))
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.remove", "os.rename", "os.mkdir", "socket.connect"):
        opened_for_writing.append(f"{event} {args}")


def in_small_child(attempt: Callable[[int], str], count: int, folder: Path) -> Counter[str]:
    """The outcomes of attempts 0 to count - 1, in a process with little memory that is ended when one takes long."""
    report = folder / "outcomes.json"
    child = os.fork()
    if child == 0:
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
            sys.addaudithook(_watch)
            outcomes: Counter[str] = Counter()
            for seed in range(count):
                signal.alarm(TIME_S)
                outcomes[attempt(seed)] += 1
                signal.alarm(0)
            report.write_text(json.dumps(outcomes))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert report.exists(), f"the process ended with {status}: {signal.SIGALRM:d} is a file that took too long"
    return Counter(json.loads(report.read_text()))
