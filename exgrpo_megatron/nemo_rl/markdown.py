"""The tables of docs/nemo.md."""

from __future__ import annotations

from exgrpo_megatron.nemo_rl.keys import FIXED, TABLE
from exgrpo_megatron.nemo_rl.verdicts import shown

BEGIN = "## Set where NeMo-RL has no key\n"
"""What stands before this in docs/nemo.md is written by hand."""


def nemo_rl_markdown() -> str:
    """What is set without a key, and every key with what becomes of it."""
    lines = [BEGIN, "| key | value | why |", "|---|---|---|"]
    lines += [f"| `{key}` | `{shown(value)}` | {reason} |" for key, (value, reason) in FIXED.items()]
    lines += ["", "## Every key", "", "`*` stands for anything not named by itself.", ""]
    lines += ["| key | | meaning here |", "|---|---|---|"]
    lines += [
        " ".join(["|", f"`{key}`", "|", row.kind, "|", *([row.meaning, "|"] if row.meaning else ["|"])])
        for key, row in TABLE.items()
    ]
    return "\n".join(lines) + "\n"
