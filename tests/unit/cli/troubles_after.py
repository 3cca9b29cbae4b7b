"""What was saved: checkpoints, several machines, conversion, export, evaluation."""

import json
import shutil
import socket
from datetime import timedelta
from pathlib import Path

import torch
from cli_project import write_lines
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from troubles import Place, error_of, trouble, trouble_of_a_run

from exgrpo_megatron.errors import LostRankError
from exgrpo_megatron.hang import Lookout
from exgrpo_megatron.places import Places
from exgrpo_megatron.process import GOES_ON, _lost_rank

TO_STEP_3 = ("train", "recipe.yaml", "grpo.max_num_steps=3")


# Checkpoints and resuming


@trouble_of_a_run
def other_questions(place: Place) -> str:
    lines = (place.folder / "train.jsonl").read_text().splitlines()
    write_lines(place.folder / "train.jsonl", *lines[::-1])
    return place.fails(*TO_STEP_3)


@trouble_of_a_run
def damaged_checkpoint(place: Place) -> str:
    path = place.folder / "run" / "checkpoints" / "step_000002" / "experience" / "experience.json"
    path.write_text(path.read_text()[:-2])
    return place.fails(*TO_STEP_3)


@trouble_of_a_run
def not_whole(place: Place) -> str:
    """And a recipe that was changed since."""
    (place.folder / "run" / "checkpoints" / "step_000002" / "state.json").unlink()
    return place.stopped(*TO_STEP_3, "experience.replay_ratio=0.25")


@trouble_of_a_run
def checkpoint_of_other_model(place: Place) -> str:
    model = Path("other")
    shutil.copytree("run/hf", model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "rope_theta": 5.0, "rope_parameters": None}))
    return place.fails(*TO_STEP_3, "policy.model_name=other")


@trouble
def run_in_use(place: Place) -> str:
    import fcntl

    (place.folder / "run").mkdir()
    with (place.folder / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return place.fails("train", "recipe.yaml")


# Several machines


@trouble
def other_number_of_processes(place: Place) -> str:
    return place.fails("train", "recipe.yaml", "cluster.num_nodes=2", "cluster.gpus_per_node=8")


@trouble
def layout_not_divided(place: Place) -> str:
    layout = "policy.megatron_cfg.tensor_model_parallel_size=4"
    return place.fails("show", "recipe.yaml", "--world-size", "6", layout)


class Lost:
    """A communicator of which another process is gone."""

    def __init__(self, *killed: int) -> None:
        self.killed = killed

    def killed_ranks(self) -> tuple[int, ...]:
        return self.killed


def lost(*killed: int) -> str:
    def raises() -> None:
        raise _lost_rank(Lost(*killed), GOES_ON)  # type: ignore[arg-type]

    return error_of(LostRankError, raises)


@trouble
def rank_killed(place: Place) -> str:
    del place
    return lost(1)


@trouble
def rank_elsewhere(place: Place) -> str:
    place.patch.setattr("exgrpo_megatron.process._DEATH_S", 0.0)
    return lost()


@trouble
def stands_still(place: Place) -> str:
    """Rank 1 grades, rank 0 has done so; one look at each, and a tenth of the limit between two judgements."""
    del place
    shared, ranks = torch.distributed.HashStore(), (Places(), Places())
    lookouts = [Lookout(places, lambda: shared, rank, 2, 1800.0) for rank, places in enumerate(ranks)]
    with ranks[1].inside("step 31: reward"), ranks[0].inside("step 31: reward"), ranks[0].inside("gathering"):
        for _ in range(300):
            verdicts = [lookout.look(lookout.beat_s) for lookout in lookouts]
            if verdicts[0]:
                return f"error: {verdicts[0].text}"
    raise AssertionError("nothing was found")


def store(port: int, *, first: bool) -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore("127.0.0.1", port, 2, first, timedelta(milliseconds=100), wait_for_workers=False)


@trouble
def port_taken(place: Place) -> str:
    """As torchrun's first process opens it."""
    del place
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        return error_of(RuntimeError, lambda: store(other.getsockname()[1], first=True))


@trouble
def first_machine_not_there(place: Place) -> str:
    del place
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # taken, and not listening
        return error_of(RuntimeError, lambda: store(other.getsockname()[1], first=False))


@trouble
def torchrun_report(place: Place) -> str:
    """What torchrun prints when it ends, of a process that the kernel killed."""
    del place
    failure = ProcessFailure(local_rank=1, pid=4242, exitcode=-9, error_file="<N/A>")
    return str(ChildFailedError("exgrpo_megatron", {1: failure}))


@trouble
def time_too_short(place: Place) -> str:
    nodes = ("--nodes", "2", "--gpus-per-node", "8")
    return place.fails("launch", "recipe.yaml", *nodes, "--time", "00:10:00")


# Export, conversion, evaluation


@trouble_of_a_run
def export_exists(place: Place) -> str:
    return place.fails("export", "run", "--out", "run/hf-step_000002", *overwritten(place))


def overwritten(place: Place) -> tuple[str, ...]:
    shutil.copytree(place.folder / "run" / "hf", place.folder / "run" / "hf-step_000002")
    return ()


@trouble_of_a_run
def export_of_no_step(place: Place) -> str:
    return place.fails("export", "run", "--step", "7")


@trouble_of_a_run
def no_config(place: Place) -> str:
    assert place.exgrpo("convert", "run/hf", "megatron", "--to", "torch_dist").code == 0
    for path in (place.folder / "megatron").glob("*/hf"):
        shutil.rmtree(path)
    for path in (place.folder / "megatron").rglob("config.json"):
        path.unlink()
    return place.fails("convert", "megatron", "out")


@trouble
def pickles(place: Place) -> str:
    folder = place.folder / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {}}, folder / "model_optim_rng.pt")
    return place.fails("convert", "iter_0000010", "out", "--config", str(place.model))


@trouble
def no_checkpoint_to_convert(place: Place) -> str:
    (place.folder / "global_step_100" / "actor").mkdir(parents=True)
    return place.fails("convert", "global_step_100/actor", "out")


@trouble
def nothing_to_evaluate(place: Place) -> str:
    return place.fails("eval", "recipe.yaml")


@trouble_of_a_run
def no_checkpoint_named(place: Place) -> str:
    return place.fails("eval", "recipe.yaml", "--checkpoint", "run")


@trouble_of_a_run
def template_of_a_set(place: Place) -> str:
    sets = ("eval.sets.sums.path=held_out.jsonl", 'eval.sets.sums.prompt_template="Solve: {question}"')
    return place.fails("eval", "recipe.yaml", "--checkpoint", "run/hf", *sets)


@trouble_of_a_run
def other_answers(place: Place) -> str:
    sets = ("eval.sets.sums.path=held_out.jsonl", "eval.sets.sums.id_key=id")
    command = ("eval", "recipe.yaml", "--checkpoint", "run/hf", *sets)
    assert place.exgrpo(*command).code == 0
    return place.fails(*command, "eval.seed=7")
