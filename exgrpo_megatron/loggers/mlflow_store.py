"""Where MLflow keeps a run: its address, and that opening it neither collides with another run nor waits for long."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from exgrpo_megatron.config import LoggerConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.loggers.protocol import LoggerError

ANSWER_S = 20.0
"""How long a database may take to answer."""
LOCK_S = 120.0
"""How long others may be making the tables of a database, which takes seconds."""
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
}
"""Of the opening, unless set: three requests of at most 6 s with 4 to 6 s between. MLflow's own are made for calls that
nobody waits for: eight requests of at most 120 s, in four minutes or more."""
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_READ_OTHERWISE = re.compile(r"\?|%[0-9A-Fa-f]{2}")
_POLL_S = 0.1


def own_uri(folder: Path) -> str:
    """Of the SQLite file in a run's folder."""
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def check(config: LoggerConfig) -> None:
    """Raise ConfigError where the run's folder has a name that is another one in the address of its database."""
    if config.mlflow.tracking_uri is not None or os.environ.get("MLFLOW_TRACKING_URI"):
        return
    folder = str(Path(config.log_dir).absolute())
    found = _READ_OTHERWISE.search(folder)
    if found:
        raise ConfigError(
            f"logger.log_dir = {folder!r} with logger.mlflow_enabled = true: {found[0]!r} means something else in the "
            "address of mlflow.db, and the file would lie elsewhere; name another folder, or set "
            "logger.mlflow.tracking_uri"
        )


@contextmanager
def opening(uri: str) -> Iterator[None]:
    """Around all that begins a run at `uri`.

    Runs that begin together on one SQLite file take turns, since MLflow makes its tables without asking whether another
    does. A database is asked once, and servers few times (`PATIENCE`), so that one which is not there is known in half
    a minute.

    Raises:
        LoggerError: the database does not answer, or others hold it.
        Exception: what its driver raises.
    """
    kind = uri.partition(":")[0].partition("+")[0]
    if kind == "sqlite":
        with _alone(uri):
            _reach(uri)
            yield
    elif kind in _DATABASES:
        _reach(uri)
        yield
    else:
        with _impatient():
            yield


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    database = make_url(uri).database
    if not database or database.startswith((":memory:", "file:")):
        yield
        return
    lock_path = Path(f"{database}.lock").absolute()
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        _wait_for(lock.fileno(), lock_path)
        yield


def _wait_for(lock: int, path: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise LoggerError(f"another run has held {path} for {LOCK_S:.0f} s") from None
            time.sleep(_POLL_S)


def _reach(uri: str) -> None:
    """Connect once: MLflow tries ten times, in 100 s, and drivers wait for minutes."""
    answer: Queue[Exception | None] = Queue()
    Thread(target=_connect, args=(uri, answer), name="mlflow database", daemon=True).start()
    try:
        found = answer.get(timeout=ANSWER_S)
    except Empty:
        raise LoggerError(f"the database did not answer within {ANSWER_S:.0f} s") from None
    if found is not None:
        raise found


def _connect(uri: str, answer: Queue[Exception | None]) -> None:
    try:
        import sqlalchemy  # noqa: PLC0415

        engine = sqlalchemy.create_engine(uri)
        engine.connect().close()
        engine.dispose()
        answer.put(None)
    except Exception as error:  # noqa: BLE001  # of any driver; raised again where it is waited for
        answer.put(error)


@contextmanager
def _impatient() -> Iterator[None]:
    """MLflow reads these with every request."""
    new = {name: value for name, value in PATIENCE.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
