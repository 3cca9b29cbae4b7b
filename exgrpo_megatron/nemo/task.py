"""What NeMo-Run runs: on every machine of a job one torchrun, whose ranks are `exgrpo train`."""

# No `from __future__ import annotations`: NeMo-Run's command line reads the types, and no text in their place.
import os
import shlex
from typing import Any

from exgrpo_megatron.config import ClusterConfig, Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.launch_command import check_text, torchrun_options, training_python
from exgrpo_megatron.recipe import dump_recipe, parse_recipe

PLACEHOLDER = "/nemo_run"
"""What NeMo-Run replaces in scripts for Slurm, wherever it stands."""

_LAUNCHED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of every rank that torchrun started."""


def section(**keys: Any) -> dict[str, Any]:
    """Keys of a recipe's section, or of the whole recipe, by name."""
    return keys


def train(config: dict[str, Any], python: str = "", folder: str = "") -> None:
    """Train a recipe on this machine's processes, `cluster.gpus_per_node` of them (1 where it is null). The process
    becomes torchrun; or a rank, where torchrun started it, as NeMo-Run's `launcher="torchrun"` does.

    Args:
        config: the recipe's keys by section.
        python: the Python that trains, as the machines see it. Empty: this one.
        folder: what the recipe's relative paths are relative to. Empty: the current one.

    Raises:
        ConfigError: it is no recipe, or this Python cannot train.
    """
    recipe, chosen = parse_recipe(config, source="task"), training_python(python)
    text = machine_script(recipe, chosen, folder, ranks_exist=_LAUNCHED_BY_TORCHRUN in os.environ)
    os.execvp("bash", ["bash", "-c", text])


def machine_script(
    config: Config,
    python: str,
    folder: str = "",
    stop_before_s: int = 600,
    *,
    ranks_exist: bool = False,
    stoppable: bool = False,
) -> str:
    """The script that every machine of the job runs, the recipe in it.

    Args:
        config: the recipe; `cluster.*` says how many machines and processes there are.
        python: the Python that trains, as the machines see it.
        folder: to be in. Empty: the one it is started in.
        stop_before_s: how long torchrun waits for its ranks to save, and a minute more.
        ranks_exist: it is started once a rank, not once a machine.
        stoppable: it writes torchrun's process id into the file of its own name with `.pid` at its end, and does not
            start torchrun where there is one with `.pid.stop`.

    Raises:
        ConfigError: a path that cannot stand in a script.
    """
    for name, value in (("--python", python), ("--folder", folder), ("logger.log_dir", config.logger.log_dir)):
        check_text(name, value)
    options = _options(config.cluster, stop_before_s)
    runner = "" if ranks_exist else f"-m torch.distributed.run \\\n    {options} \\\n    "
    return _TEMPLATE.format(
        folder=f"cd {shlex.quote(folder)}\n" if folder else "",
        process_id=_STOPPABLE if stoppable else "",
        log_dir=shlex.quote(config.logger.log_dir),
        recipe=dump_recipe(config),
        python=shlex.quote(python),
        runner=runner,
    )


def check_placeholder(script: str) -> None:
    """Raise ConfigError for a script that NeMo-Run would change for Slurm without a container."""
    line = next((line for line in script.splitlines() if PLACEHOLDER in line), None)
    if line is not None:
        raise ConfigError(
            f"{line.strip()!r}: NeMo-Run puts the job's folder in place of {PLACEHOLDER!r} wherever it stands in a "
            "script; name that path otherwise, by a link for example, or launch without NeMo-Run"
        )


def _options(cluster: ClusterConfig, stop_before_s: int) -> str:
    nodes, processes = cluster.num_nodes or 1, cluster.gpus_per_node or 1
    return torchrun_options(nodes, processes, stop_before_s)


_STOPPABLE = """\
echo $$ >"$0.pid"
[ ! -e "$0.pid.stop" ] || exit 143
"""

_TEMPLATE = """\
set -eu
{folder}log_dir={log_dir}
mkdir -p -- "$log_dir"
# Of this machine; each of its processes may write it, and the same.
recipe="$log_dir/launched-$HOSTNAME.yaml"
cat >"$recipe.$$" <<'END_OF_RECIPE'
{recipe}END_OF_RECIPE
mv -f -- "$recipe.$$" "$recipe"
{process_id}exec {python} {runner}-m exgrpo_megatron train "$recipe"
"""
