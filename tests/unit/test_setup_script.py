"""scripts/setup.py says that it goes on, and what a step that failed has said."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture
def setup(monkeypatch):
    path = Path(__file__).resolve().parents[2] / "scripts" / "setup.py"
    spec = importlib.util.spec_from_file_location("setup_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SIGN_OF_LIFE_S", 0.1)
    return module


def test_a_long_step_gives_signs_of_life_and_keeps_its_output_to_itself(setup, capsys):
    setup._run("installing", [sys.executable, "-c", "import time; print('quiet'); time.sleep(0.4)"])
    first, *alive, last = capsys.readouterr().out.splitlines()
    assert first == "[setup] installing ..."
    assert alive  # at least one in 0.4 s
    assert all(line.startswith("[setup]     still at it after ") for line in alive)
    assert last.startswith("[setup]     ")


def test_a_step_that_fails_shows_all_it_said(setup, capsys):
    with pytest.raises(setup.SetupError, match="installing: exit code 3"):
        setup._run("installing", [sys.executable, "-c", "import sys; print('why'); sys.exit(3)"])
    assert "why\n" in capsys.readouterr().out
