"""Addresses of servers and databases without what opens them: user, password, tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote

# First an authority as RFC 3986 has it; then a password with a slash or such, which database addresses may have. A
# number up to the next slash is a port, and an @ further on part of the path.
_USER_INFO = re.compile(r"(?<=://)(?:[^/?#\s]*@|[^:/?#@\s]*:(?!\d+[/?#])[^@\s]*@)")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"<>)]+")
_SHORTEST = 4
"""Characters of a secret that is looked for by itself; a shorter one would be found inside words."""


def without_credentials(text: str, secrets: Iterable[str] = ()) -> str:
    """An address, or a text with addresses, without their users, passwords and queries, and with *** for each of
    `secrets`."""
    text = _QUERY.sub(r"\1?***", _USER_INFO.sub("", text))
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, "***")
    return text


def secrets_in(address: str) -> list[str]:
    """The password (or the token in its place) and the values of the query, as written and decoded."""
    found = _USER_INFO.search(address)
    user, _, password = found[0][:-1].partition(":") if found else ("", "", "")
    values = [value for _, value in parse_qsl(address.partition("?")[2])]
    raw = [part.partition("=")[2] for part in address.partition("?")[2].split("&")]
    return [value for value in {password or user, unquote(password or user), *values, *raw} if value]
