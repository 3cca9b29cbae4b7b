"""Whole runs on a script, and what costs seconds to make, made once: the verifier's processes, the embedded model."""

import shutil

import pytest
from scripted import ScriptedEngine, right, wrong

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.data.embedded_model import materialize
from exgrpo_megatron.parts import SilentReporter
from exgrpo_megatron.rewards.verifier import MathVerifier
from exgrpo_megatron.session import StopSignal, TrainingRun


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
    """Name and seed of an embedded model -> its folder."""
    folders = {}

    def folder_of(name, seed):
        if (name, seed) not in folders:
            folders[name, seed] = materialize(name, tmp_path_factory.mktemp("embedded") / "model", seed)
        return folders[name, seed]

    return folder_of


@pytest.fixture(autouse=True)
def made_once(monkeypatch, shared_verifier, shared_model):
    def copied(name, folder, seed):
        shutil.copytree(shared_model(name, seed), folder, dirs_exist_ok=True)

    monkeypatch.setattr(build, "build_verifier", lambda *_: shared_verifier)
    monkeypatch.setattr(run_inputs, "materialize", copied)


class StopAfter(SilentReporter):
    """Asks for a stop, as SIGTERM does, once `steps` steps are done."""

    def __init__(self, stop, steps, on_step):
        self.stop, self.left, self.notes, self.done, self.on_step = stop, steps, [], 0, on_step

    def step_line(self, metrics):
        self.done += 1
        self.on_step(self.done)
        self.left -= 1
        self.stop.requested |= self.left == 0

    def note(self, text):
        self.notes.append(text)


def answers(question_id, samples, version):
    """Right answers of changing form, one at first and two from version 3 of the weights on; the rest wrong."""
    good = [right(question_id, version % 3), right(question_id, (version + 1) % 3)][: 1 + (version >= 3)]
    return [*good, *[wrong(question_id)] * (samples - len(good))][:samples]


@pytest.fixture
def run_steps(monkeypatch, data_parallel):
    """Runs a recipe for a number of steps (resuming if it can); returns the run and what it noted.

    `stop` may ask for an earlier end; `on_step` gets the number of each step of this run that is done, before anything
    is saved.
    """

    def run(config, steps, on_step=lambda number: None, stop=None):
        inputs = run_inputs.load_inputs(config, data_parallel)

        def engine_of(*_):
            # The script follows the weights' version, so that a resume must restore it.
            engine = ScriptedEngine(inputs.tokenizer, inputs.train.questions, None)
            engine.script = lambda name, samples: answers(name, samples, engine.policy_version)
            return engine

        monkeypatch.setattr(build, "build_engine", engine_of)
        stop = stop or StopSignal()
        reporter = StopAfter(stop, steps, on_step)
        training = TrainingRun(config, inputs, inputs.model_dir, data_parallel, reporter)
        training.run(stop)
        return training, reporter.notes

    return run
