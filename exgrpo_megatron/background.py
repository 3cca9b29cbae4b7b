"""A function in a thread of its own, whose result or failure is asked for later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Start `function` in a thread that does not keep the process alive: one that must leave does not wait for it."""
    future: Future[T] = Future()
    Thread(target=_run, args=(function, future), name="exgrpo-background", daemon=True).start()
    return future


def completed(function: Callable[[], T]) -> Future[T]:
    """The same, done before it returns."""
    future: Future[T] = Future()
    _run(function, future)
    return future


def _run(function: Callable[[], T], future: Future[T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 (raised to whoever asks for the result)
        future.set_exception(error)
    else:
        future.set_result(result)
