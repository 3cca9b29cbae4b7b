"""Around every command: quiet libraries, the process groups, and one clear message for what went wrong."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.markup import escape

from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import LostRankError, UserError
from exgrpo_megatron.hang import Lookout, watched
from exgrpo_megatron.places import Places
from exgrpo_megatron.stop import StoppedAtOnceError, StopSignal

if TYPE_CHECKING:
    from exgrpo_megatron.policy.distributed import DataParallel

USER_ERROR, STOPPED_AT_ONCE = 2, 130
"""Exit codes."""

GOES_ON = "the same command goes on from the newest checkpoint"
AGAIN = "the same command begins again"
"""What to do about a run that was lost, where checkpoints are saved and where none are."""

HANG_FOLDER = "hang"
"""Of the run's folder: what was found of a run that stood still."""

PATIENCE_S = 10.0
"""How long a rank other than 0 keeps an error to itself: much longer than a launcher needs to end it."""

_DEATH_S = 3.0
"""How long after its connections are closed a killed process may still be seen."""

_ENVIRONMENT_ERRORS = frozenset(
    {
        errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSPC,
        errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.ESTALE,
    }
)  # fmt: skip
"""OSErrors that come from disks, quotas and permissions, not from a mistake of this program."""


def launched_rank() -> int:
    """This process's rank as its launcher says; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def launched_processes() -> int:
    """How many processes its launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def program() -> str:
    """What to type in this folder for `exgrpo`, also where its environment is not activated."""
    if shutil.which("exgrpo"):
        return "exgrpo"
    if Path(sys.argv[0]).name == "exgrpo":
        return _short(sys.argv[0])
    return f"{_short(sys.executable)} -m exgrpo_megatron"


def _short(path: str) -> str:
    """Relative to the current folder where it is in it."""
    short = os.path.relpath(path)
    return os.path.abspath(path) if short.startswith("..") else short


def command(*args: str | Path) -> str:
    """A command with its arguments, to be copied."""
    return f"{program()} {shlex.join(map(str, args))}"


def say(comm: Communicator, text: str) -> None:
    """A line of output, from rank 0 alone."""
    if comm.is_main:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def process_group(config: Config, *, advice: str = AGAIN, watch: bool = True) -> Iterator[DataParallel]:
    """The processes of the run, left at the end; libraries are kept quiet inside.

    Where nothing moves for `cluster.hang_timeout_s`, the process ends with a message that says which rank is behind.

    Args:
        config: the recipe.
        advice: ends every message on a run that was lost.
        watch: whether to end it where it stands still. A process that is always alone waits for no other: who started
            it sees best whether it is slow.

    Raises:
        LostRankError: another process ended early.
        UserError: the GPU's memory did not suffice.
    """
    # Idle OpenMP threads sleep instead of spinning: on a machine that is shared, spinning made a step ten times slower.
    # Read when torch is loaded, below; a user's own setting stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    quiet_libraries()
    import torch  # noqa: PLC0415

    from exgrpo_megatron.policy import distributed  # noqa: PLC0415

    quiet_transformers()
    places = Places()
    with _watched(config, places, advice) if watch else nullcontext():
        comm = distributed.initialize(config.policy, config.cluster, config.grpo.seed, places)
        try:
            yield comm
            comm.barrier()
        except (RuntimeError, UserError) as error:
            if comm.world_size > 1 and distributed.lost_rank(error):
                raise _lost_rank(comm, advice) from error
            if isinstance(error, torch.OutOfMemoryError):
                raise _out_of_memory(error, advice) from error
            raise
        finally:
            comm.shutdown()


def _watched(config: Config, places: Places, advice: str) -> AbstractContextManager[None]:
    from exgrpo_megatron.policy.distributed import side_store  # noqa: PLC0415

    rank = launched_rank()
    lookout = Lookout(places, side_store, rank, launched_processes(), config.cluster.hang_timeout_s)
    folder = Path(config.logger.log_dir) / HANG_FOLDER

    def leave(message: str, speaks: bool) -> NoReturn:
        _leave_hanging(f"{message}; {advice}", speaks)

    return watched(lookout, rank, folder, leave)


def _leave_hanging(message: str, speaks: bool) -> NoReturn:
    """End a process whose main thread hangs; called in another one."""
    if speaks:
        _tell_launcher(message)
        # Whatever draws a progress bar may hang with a lock that a console would wait for; bars hide the cursor.
        shown = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{shown}\nerror: {_whose()}{message}\n".encode())
    else:
        time.sleep(PATIENCE_S)
    os._exit(USER_ERROR)


@contextmanager
def whole_run(config: Config) -> Iterator[tuple[Communicator, StopSignal]]:
    """The processes of a command that writes into the run's folder, which is theirs alone, and stops on a signal.

    SIGTERM is ignored afterwards: the caller ends the process, or sets its own handler again.
    """
    with process_group(config, advice=GOES_ON if config.checkpointing.enabled else AGAIN) as comm:
        from exgrpo_megatron.run_folder import locked_folder  # noqa: PLC0415

        with locked_folder(config, comm), StopSignal(announce=comm.is_main).installed(to_the_end=True) as stop:
            yield comm, stop
            comm.barrier()  # a signal must not end who waits here for the others


def _lost_rank(comm: DataParallel, advice: str) -> LostRankError:
    """The error of a process whose collective failed for want of another one."""
    deadline = time.monotonic() + _DEATH_S
    while not (killed := comm.killed_ranks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not killed:
        return LostRankError("another process of the run ended, and this one cannot go on without it; see its message")
    ranks = f"rank {killed[0]}" if len(killed) == 1 else f"ranks {', '.join(map(str, killed))}"
    return LostRankError(
        f"{ranks} ended without a message: killed, perhaps for want of memory, of which the kernel's log would tell; "
        f"the others cannot go on without it, and {advice}",
        killed,
    )


def _out_of_memory(error: BaseException, advice: str) -> UserError:
    """What torch says of the sizes, and the last function of this program before it."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "exgrpo_" in frame.filename]
    where = f" in {ours[-1].name} ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    sizes = str(error).split(" Including ")[0].split("\n")[0]
    return UserError(
        f"out of memory{where}: {sizes} `exgrpo show RECIPE --world-size N` says what each phase of a step needs, and "
        f"docs/operations.md in which order to change what; {advice}"
    )


@contextmanager
def reported_errors(*, last: bool = False) -> Iterator[None]:
    """Ends the process with one message and exit code 2 for what the user must change; bugs keep their traceback.

    `last`: the process ends after this block, so that what SIGTERM does then (`whole_run`) stays as it is.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except LostRankError as error:
        _report_lost_rank(error)
    except UserError as error:
        _fail(str(error))
    except FloatingPointError as error:
        _fail(f"{error}: the policy has diverged; lower its learning rate and go on from the last checkpoint")
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRORS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}: make room, mend the permissions, or choose another logger.log_dir")
    except StoppedAtOnceError:
        _fail("stopped at once: nothing is saved of the steps since the last checkpoint", STOPPED_AT_ONCE)
    finally:
        if not last:
            signal.signal(signal.SIGTERM, on_sigterm)


def _report_lost_rank(error: LostRankError) -> NoReturn:
    if not error.killed:
        _let_launcher_end_this()
        time.sleep(2 * PATIENCE_S)  # longer than the rank that ended keeps its message to itself
        _fail(str(error))
    first_here = launched_rank() - int(os.environ.get("LOCAL_RANK", "0"))
    if not all(rank in error.killed for rank in range(first_here, launched_rank())):
        _let_launcher_end_this()
        time.sleep(PATIENCE_S)
    _write_error(str(error))
    raise SystemExit(USER_ERROR)


def quiet_libraries() -> None:
    """Our own warnings as one line each, on rank 0; of libraries only errors: their warnings say nothing to act on."""
    level = logging.WARNING if launched_rank() == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s", handlers=[_LineHandler()])
    warnings.filterwarnings("ignore", module=r"(megatron|torch|vllm)\..*")


def quiet_transformers() -> None:
    """No progress bar for every model folder that is written or read back."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


class _LineHandler(logging.Handler):
    """Writes to the stderr of the moment, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and not record.name.startswith("exgrpo"):
            return
        sys.stderr.write(f"{record.levelname.lower()}: {self.format(record)}\n")


def let_rank_0_speak() -> None:
    """On another rank wait: where rank 0 fails of the same, its launcher ends this process meanwhile."""
    if launched_rank():
        _let_launcher_end_this()
        time.sleep(PATIENCE_S)


def _let_launcher_end_this() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _fail(message: str, code: int = USER_ERROR) -> NoReturn:
    _tell_launcher(message)
    let_rank_0_speak()
    _write_error(message)
    raise SystemExit(code)


def _write_error(message: str) -> None:
    Console(stderr=True).print(f"[red]error:[/red] {escape(_whose() + message)}", soft_wrap=True, highlight=False)
    sys.stdout.flush()


def _whose() -> str:
    rank = launched_rank()
    return f"rank {rank}: " if rank else ""


def _tell_launcher(message: str) -> None:
    """Put the message where torchrun looks for what to print of this rank, with the time by which it finds the first
    one that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")
