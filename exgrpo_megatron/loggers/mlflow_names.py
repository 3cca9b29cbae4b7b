"""Names that MLflow takes, one for each of ours."""

from __future__ import annotations

import re
from hashlib import sha256

_FOREIGN = re.compile(r"[^/\w.\- :]")
_LENGTH = 250
"""Characters of a name, at most."""


def mlflow_name(name: str) -> str:
    """`name` where MLflow takes it, else what it takes of it with eight digits of its SHA-256 behind, so that two
    names never become one and a name is the same in every step and process.

    MLflow takes letters, digits and `_ - . : /` and spaces, as a relative path in its shortest form.
    """
    parts = [part if part.strip(".") else "_" * max(len(part), 1) for part in _FOREIGN.sub("_", name).split("/")]
    taken = re.sub(r"^\.\.", "__", "/".join(parts))
    if taken == name and len(name) <= _LENGTH:
        return name
    mark = "-" + sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return taken[: _LENGTH - len(mark)] + mark
