"""How many answers, and how much CPU time, each way of training takes: the real trainer, over seeds (docs/learning.md).

    OMP_NUM_THREADS=1 python benchmarks/learning.py run --out runs/learning
    python benchmarks/learning.py table --out runs/learning

`run` trains the settings of learning_settings.py (those with `--only` in their names) with each seed and adds a line to
OUT/results.jsonl for every run that ends; begun again, it goes on where it was. A seed changes meanings, training
questions and every draw; the warm starts are kept in OUT. `table` prints Markdown tables of what is there, with 95%
t-intervals of the mean over seeds, and draws pictures into OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from learning_further import FURTHER, noted_table
from learning_run import Measured, configured, identity, run, warm_start
from learning_settings import SETTINGS, Setting
from learning_table import draw_pictures, tables

from exgrpo_megatron.process import process_group

RESULTS = "results.jsonl"


def main() -> None:
    """Run, or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, default=6, help="seeds 0 to this - 1")
    parser.add_argument("--only", default="", help="settings with this in 'task: name'")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, one thread each")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = [setting for setting in [*SETTINGS, *FURTHER] if arguments.only in f"{setting.task}: {setting.name}"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.command == "table":
        measured = current_results(settings, arguments.out)
        print(tables(settings, measured))
        print(noted_table(measured))
        for path in draw_pictures(settings, measured, arguments.out):
            print(path, file=sys.stderr)
    elif arguments.jobs == 1:
        first, step = arguments.part
        run_missing(missing(settings, arguments.seeds, arguments.out)[first::step], arguments.out)
    else:
        side_by_side(missing(settings, arguments.seeds, arguments.out), arguments)


def current_results(settings: Sequence[Setting], out: Path) -> list[Measured]:
    """The finished runs of these settings as the recipes are now; others are counted on standard error."""
    path, listed = out / RESULTS, {(setting.task, setting.name): setting for setting in settings}
    lines = [Measured(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    mine = [(line, listed[line.task, line.setting]) for line in lines if (line.task, line.setting) in listed]
    current = [
        line for line, setting in mine if line.identity == identity(configured(setting, line.seed, out), setting)
    ]
    if len(current) < len(mine):
        print(f"{len(mine) - len(current)} runs of another recipe or length do not count", file=sys.stderr)
    return current


def missing(settings: Sequence[Setting], num_seeds: int, out: Path) -> list[tuple[Setting, int]]:
    """What is left to run: all seeds of a setting before the next."""
    done = {(line.task, line.setting, line.seed) for line in current_results(settings, out)}
    wanted = [(setting, seed) for setting in settings for seed in range(num_seeds)]
    return [(setting, seed) for setting, seed in wanted if (setting.task, setting.name, seed) not in done]


def run_missing(todo: Sequence[tuple[Setting, int]], out: Path) -> None:
    """One after the other, in this process."""
    if not todo:
        return
    with process_group(configured(*todo[0], out)) as comm:
        for number, (setting, seed) in enumerate(todo, 1):
            begun = time.monotonic()
            measured = run(configured(setting, seed, out), setting, seed, comm)
            with (out / RESULTS).open("a") as file:
                file.write(json.dumps(asdict(measured)) + "\n")
            print(
                f"{number}/{len(todo)} {setting.task}: {setting.name}, seed {seed}: T=1 {measured.t1[-1]:.3f}, greedy "
                f"{measured.greedy[-1]:.3f} after {measured.answers[-1]} answers, {measured.cpu_s[-1]:.1f} CPU s "
                f"({time.monotonic() - begun:.0f} s)",
                flush=True,
            )


def side_by_side(todo: Sequence[tuple[Setting, int]], arguments: argparse.Namespace) -> None:
    """Each process takes every n-th of the runs; the warm starts are made before, or all of them would."""
    firsts = {setting.task: (setting, seed) for setting, seed in reversed(todo)}
    for setting, seed in firsts.values():
        config = configured(setting, seed, arguments.out)
        with process_group(config) as comm:
            warm_start(config, comm)
    command = [sys.executable, __file__, "run", "--out", str(arguments.out), "--seeds", str(arguments.seeds)]
    command += ["--only", arguments.only]
    children = [
        subprocess.Popen([*command, "--part", str(part), str(arguments.jobs)]) for part in range(arguments.jobs)
    ]
    if any([child.wait() for child in children]):
        raise SystemExit("a process failed; the same command goes on with what is left")


if __name__ == "__main__":
    main()
