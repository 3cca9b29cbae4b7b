"""The doctor, on real packages: those of this environment, and broken ones laid on disk."""

import io
from dataclasses import replace
from pathlib import Path

import megatron.core
import pytest
import torch
from rich.console import Console

from exgrpo_megatron.doctor import (
    PACKAGES,
    Finding,
    accelerators_in,
    choices,
    diagnose,
    examine,
    import_fault,
    print_report,
)

BY_NAME = {package.name: package for package in PACKAGES}


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    """What the doctor finds here; made once, as it imports Megatron in a process of its own."""
    return diagnose()


def install(folder: Path, module: str, distribution: str, version: str, code: dict[str, str]) -> None:
    """Lay a package and its metadata on disk as pip would."""
    for name, text in code.items():
        path = folder / module / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize(
    "error",
    ["RuntimeError('no sibling')", "OSError('libcudart')", "FileNotFoundError('core.so')", "ImportError('torch')"],
)
def test_a_transformer_engine_that_does_not_import_is_half_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
):
    code = {"__init__.py": "", "pytorch/__init__.py": f"raise {error}"}
    install(tmp_path, "transformer_engine", "transformer_engine", "2.20.2", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = examine(BY_NAME["transformer-engine"])
    assert (finding.installed, finding.status) == ("2.20.2", "half installed")
    assert error.split("(")[0] in finding.gives


def test_a_triton_that_does_not_import_is_half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "triton", "triton", "3.7.1", {"__init__.py": "raise ImportError('libtriton.so')"})
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = examine(BY_NAME["triton"])
    assert (finding.installed, finding.status) == ("3.7.1", "half installed")
    library = accelerators_in([finding], "a GPU").triton
    assert (library.works, library.fault) == (False, "libtriton.so")
    assert choices([finding])["LM head, loss"] == "exgrpo_kernels, linear form, in torch (no GPU for Triton)"


def test_a_package_that_kills_the_process_is_half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = {"__init__.py": "", "pytorch/__init__.py": "import os; os.abort()"}
    install(tmp_path, "transformer_engine", "transformer_engine", "2.20.2", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert examine(BY_NAME["transformer-engine"]).status == "half installed"


def test_metadata_without_a_module_is_half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "elsewhere", "vllm_elsewhere_cpu", "0.33.0", {"__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    # Under other names than vLLM's own, which may be installed where the tests run.
    assert examine(
        replace(BY_NAME["vllm"], module="vllm_elsewhere", distributions=("vllm", "vllm_elsewhere_cpu"))
    ) == Finding(
        "vllm",
        "0.33.0",
        "half installed",
        "faster rollouts (policy.generation.backend: vllm; on a CPU: make setup-vllm); "
        "reinstall it: no module vllm_elsewhere",
    )


def test_another_package_named_apex_is_not_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # An unrelated web toolkit has this name on package indexes; Megatron wants apex.optimizers.
    install(tmp_path, "apex", "apex", "0.9.10", {"__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = examine(BY_NAME["apex"])
    assert finding.status == "half installed"
    assert "No module named 'apex.optimizers'" in finding.gives


def test_a_working_module_has_no_fault_and_a_missing_one_is_named():
    assert import_fault("json") is None
    assert import_fault("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"


def test_the_packages_of_this_environment_are_found_with_their_versions(findings: list[Finding]):
    found = {finding.name: finding for finding in findings}
    assert found["megatron-core"] == Finding(
        "megatron-core", megatron.core.__version__, "ok", BY_NAME["megatron-core"].gives
    )
    assert found["torch"].installed is not None
    assert found["torch"].installed.startswith(torch.__version__)
    assert "gloo" in (found["collectives"].installed or "")
    assert not [finding for finding in found.values() if finding.status == "missing"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU machine would use")
def test_a_cpu_machine_uses_gloo_and_torch():
    chosen = choices([Finding("transformer-engine", "2.20.2", "half installed", "")])
    assert chosen["device"] == "CPU"
    assert chosen["backend"] == "gloo"
    assert "torch.optim.AdamW" in chosen["optimizer"]
    assert "scaled_dot_product_attention" in chosen["attention"]


def test_what_is_half_installed_counts_with_its_fault_and_no_gpu_takes_nothing():
    findings = [
        Finding("apex", "0.1", "ok", ""),
        Finding(
            "transformer-engine", "2.20.2", "half installed", "layers; complete it or remove it: RuntimeError: empty"
        ),
    ]
    found = accelerators_in(findings, gpu="some GPU")
    assert found.apex.works
    assert found.transformer_engine.fault == "empty"
    assert accelerators_in([Finding("transformer-engine", "1.13", "ok", "")], None).transformer_engine.fault == (
        "older than 2.5"
    )
    if not torch.cuda.is_available():
        assert choices(findings)["optimizer"] == "Megatron's, around torch.optim.AdamW"


def test_the_report_prints_every_finding(findings: list[Finding]):
    output = io.StringIO()
    print_report(findings, Console(file=output, width=160))
    text = output.getvalue()
    for name in (*BY_NAME, "python", "torch", "cores", "memory", "backend", "attention"):
        assert name in text
