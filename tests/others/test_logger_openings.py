"""How runs begin in MLflow and W&B: together, with credentials, and where nothing answers."""

import json
import logging
import multiprocessing
import socket
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from other_tools import needs

from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.errors import ConfigError, UserError
from exgrpo_megatron.loggers.choice import check_loggers, open_loggers
from exgrpo_megatron.loggers.protocol import RunFacts

pytestmark = needs("wandb", "mlflow", "sqlalchemy")


def facts_of(folder, **logger):
    folder.mkdir(parents=True, exist_ok=True)
    config = LoggerConfig.model_validate({"log_dir": str(folder), **logger})
    return RunFacts(config, folder, name="run", suffix="", recipe={"grpo": {"seed": 1}}, made_with={})


def mlflow_at(uri):
    return {"mlflow_enabled": True, "mlflow": {"tracking_uri": uri}}


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


EXPERIMENT = {"experiment_id": "7", "name": "exgrpo", "lifecycle_stage": "active"}
RUN = {"info": {"run_id": "r1", "run_name": "run", "experiment_id": "7", "status": "RUNNING"}, "data": {}}


class TrackingServer(BaseHTTPRequestHandler):
    """The part of MLflow's REST protocol that a run needs; another run makes the experiment just before this one."""

    asked: list

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/api/2.0/mlflow/")
        if path == "experiments/get-by-name" and "experiments/create" not in self.asked:
            self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none of this name"})
        else:
            self.answer(200, {"experiment": EXPERIMENT} if path.startswith("experiments/") else {"run": RUN})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path.removeprefix("/api/2.0/mlflow/"))
        if self.asked[-1] == "experiments/create":
            self.answer(400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "there is one"})
        else:
            self.answer(200, {"run": RUN} if self.asked[-1] == "runs/create" else {})

    do_PATCH = do_POST

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def tracking_server():
    asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (TrackingServer,), {"asked": asked}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_password_in_the_address_is_shown_nowhere_and_an_experiment_made_meanwhile_is_taken(
    tmp_path, monkeypatch, capfd
):
    with tracking_server() as (port, asked):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:SECRET@127.0.0.1:{port}")
        (log,) = open_loggers(facts_of(tmp_path, mlflow_enabled=True), last_step=0)
        log.write(1, {"policy/loss": 0.5})
        log.close()
    assert log.lost() == []
    # Tags, the metrics of the step, and the end.
    assert asked == ["experiments/create", "runs/create", "runs/log-batch", "runs/log-batch", "runs/update"]
    assert log.where == f"run r1 of http://127.0.0.1:{port}"
    assert "SECRET" not in "".join(capfd.readouterr())


def test_a_server_that_is_not_there_ends_a_new_run_in_half_a_minute_without_its_password(tmp_path, monkeypatch):
    port = closed_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:SECRET@127.0.0.1:{port}")
    before = time.monotonic()
    with pytest.raises(
        UserError, match=r"mlflow_enabled = true, but MLflow cannot begin a run: .*refused.*mend it"
    ) as raised:
        open_loggers(facts_of(tmp_path, mlflow_enabled=True), last_step=0)
    # Three tries with 0 and 4 s and up to a second each between them; MLflow's own number of tries takes minutes.
    assert time.monotonic() - before < 30
    assert "SECRET" not in str(raised.value)
    assert f"http://127.0.0.1:{port}" in str(raised.value)


@pytest.mark.parametrize(
    "uri", ["postgresql://me:SECRET@127.0.0.1/db", "sqlite:////proc/none/mlflow.db", "nonsense://x"]
)
def test_whatever_mlflow_fails_at_ends_a_new_run_with_a_sentence_and_not_one_that_goes_on(tmp_path, caplog, uri):
    # A driver that is not installed (or a server that is not there), a folder that cannot be made, an unknown kind.
    with pytest.raises(
        UserError, match=r"mlflow_enabled = true, but MLflow cannot begin a run: \w+: .*=false"
    ) as raised:
        open_loggers(facts_of(tmp_path, **mlflow_at(uri)), last_step=0)
    with caplog.at_level(logging.WARNING):
        assert open_loggers(facts_of(tmp_path, **mlflow_at(uri)), last_step=3) == []
    assert "MLflow gets nothing of this part of the run: " in caplog.text
    assert "SECRET" not in str(raised.value) + caplog.text


def test_whatever_wandb_fails_at_ends_a_new_run_with_a_sentence_and_not_one_that_goes_on(tmp_path, monkeypatch, caplog):
    offline = {"wandb_enabled": True, "wandb": {"mode": "offline"}}
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "soon")
    with pytest.raises(
        UserError, match=r"wandb_enabled = true, but Weights & Biases cannot begin a run: ValidationError"
    ):
        open_loggers(facts_of(tmp_path, **offline), last_step=0)
    with caplog.at_level(logging.WARNING):
        assert open_loggers(facts_of(tmp_path, **offline), last_step=3) == []
    assert "Weights & Biases gets nothing of this part of the run: ValidationError" in caplog.text
    with pytest.raises(ConfigError, match=r"W&B refuses its settings: .*init_timeout"):
        check_loggers(facts_of(tmp_path, wandb_enabled=True, wandb={"mode": "online"}).logger)


def begin(folder, uri):
    (log,) = open_loggers(facts_of(folder, **mlflow_at(uri)), last_step=0)
    log.write(1, {"policy/loss": 0.5})
    log.close()
    assert log.lost() == []


def test_runs_that_begin_together_on_a_new_database_are_all_in_it(tmp_path):
    from mlflow import MlflowClient

    # A folder whose name has what addresses have a meaning for; and that MLflow has not made.
    uri = f"sqlite:///{tmp_path / 'all #1 at@home'}/mlflow.db"
    processes = [
        multiprocessing.get_context("spawn").Process(target=begin, args=(tmp_path / str(n), uri)) for n in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("exgrpo").experiment_id])
    assert [run.data.metrics for run in runs] == [{"policy/loss": 0.5}] * 2

    # In the same database, since making one takes seconds: categories of questions that MLflow takes no name of.
    names = [
        f"validation/pass_rate_t1/{c}"
        for c in ("a//b", "a/", "/x", "..", "./x", "c" * 300, "num+th", "num*th", "num_th")
    ]
    (log,) = open_loggers(facts_of(tmp_path / "names", **mlflow_at(uri)), last_step=0)
    log.write(1, {name: float(place) for place, name in enumerate(names)})
    log.close()
    assert log.lost() == []
    kept = client.get_run(json.loads((tmp_path / "names/loggers/mlflow.json").read_text())["run_id"]).data.metrics
    assert sorted(kept.values()) == [float(place) for place in range(len(names))]
    assert kept["validation/pass_rate_t1/num_th"] == 8.0
