"""Hands a step to W&B offline and to MLflow in a file, then says which addresses the process asked for; run by
test_loggers.py."""

from __future__ import annotations

import atexit
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

asked: list[str] = []


def note(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        asked.append(str(arguments[0]))
    elif event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        asked.append(str(arguments[1]))


def say() -> None:
    sys.stdout.write(f"connections: {asked}\n")


def main(folder: Path) -> None:
    from exgrpo_megatron.config import LoggerConfig
    from exgrpo_megatron.loggers.choice import check_loggers, open_loggers
    from exgrpo_megatron.loggers.protocol import RunFacts

    config = LoggerConfig.model_validate({"wandb_enabled": True, "wandb": {"mode": "offline"}, "mlflow_enabled": True})
    check_loggers(config)
    facts = RunFacts(config, folder, name="run", suffix="", recipe={"grpo": {"seed": 1}}, made_with={})
    for log in open_loggers(facts, last_step=0):
        log.write(1, {"policy/loss": 0.5})
        log.finish({"last_step": 1.0}, [])
        log.close()
        sys.stdout.write(f"{log.title} {log.lost()}\n")


if __name__ == "__main__":
    atexit.register(say)  # the first to be registered is the last to be called
    sys.addaudithook(note)
    main(Path(sys.argv[1]))
