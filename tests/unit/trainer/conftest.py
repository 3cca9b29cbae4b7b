"""What costs seconds to make is made once for all trainer tests: the verifier's processes and the embedded model."""

import shutil

import pytest

from exgrpo_megatron import build
from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.data.embedded_model import materialize
from exgrpo_megatron.rewards.verifier import MathVerifier


class KeptOpen:
    """A verifier that outlives the runs it serves."""

    def __init__(self, verifier):
        self.grade = verifier.grade

    def close(self):
        pass


@pytest.fixture(scope="session")
def shared_verifier():
    with MathVerifier(MathEnvConfig(num_workers=1)) as verifier:
        yield KeptOpen(verifier)


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory):
    """Seed of the embedded model's weights -> its folder."""
    folders = {}

    def folder_of(name, seed):
        if seed not in folders:
            folders[seed] = materialize(name, tmp_path_factory.mktemp("embedded") / "model", seed)
        return folders[seed]

    return folder_of


@pytest.fixture(autouse=True)
def made_once(monkeypatch, shared_verifier, shared_model):
    def copied(name, folder, seed):
        shutil.copytree(shared_model(name, seed), folder, dirs_exist_ok=True)

    monkeypatch.setattr(build, "build_verifier", lambda config: shared_verifier)
    monkeypatch.setattr(build, "materialize", copied)
