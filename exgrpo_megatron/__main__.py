"""`exgrpo`, `python -m exgrpo_megatron` and `torchrun -m exgrpo_megatron`: the command, and Ctrl-C while it loads."""

import os
import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it with one line and exit code 130, from the first import on."""
    try:
        from exgrpo_megatron.cli import main as run  # noqa: PLC0415 (half a second, in which one may press Ctrl-C)

        run()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("error: stopped by Ctrl-C\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
