"""Commands run in this process, in a folder with a small recipe and, where asked for, a finished run of it."""

import shutil

import pytest
from cli_project import Result, write_inputs

from exgrpo_megatron import cli
from exgrpo_megatron.policy import distributed


class KeptOpen:
    """The process group of the test session, which a command must not close."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def shutdown(self):
        pass


@pytest.fixture
def joined_group(monkeypatch, data_parallel):
    """What runs in this process joins the process group of the test session."""

    def joined(policy, cluster, seed, places):
        distributed._check_cluster(cluster, 1)
        return KeptOpen(data_parallel)

    monkeypatch.setattr(distributed, "initialize", joined)


@pytest.fixture
def exgrpo(capsys, monkeypatch, joined_group):
    """Runs a command in this process and the current folder; returns exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder: the recipe, its questions, and no run yet."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def _trained(tmp_path_factory, data_parallel):
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(distributed, "initialize", lambda *_: KeptOpen(data_parallel))
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "recipe.yaml"])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def trained(_trained, tmp_path, monkeypatch):
    """The current folder, with a finished run of two steps."""
    shutil.copytree(_trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
