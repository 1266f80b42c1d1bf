"""Find secrets in options, and remove them from URLs and from clients' messages.

When a client's error becomes ours, `Redactor` removes the secret values of the client's options from the message, and
any text that looks like a password in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

SECRET_OPTIONS = frozenset({
    "account_key",
    "aws_secret_access_key",
    "aws_session_token",
    "client_secret",
    "connection_string",
    "credential",
    "password",
    "private_key",
    "refresh_token",
    "sas_token",
    "secret",
    "token",
})  # fmt: skip
_NAMES_OF_KEYS = frozenset({"key", "aws_access_key_id", "access_key", "client_id", "private_key_id"})
_PUBLIC_TOKENS = frozenset(
    {"anon", "browser", "cache", "cloud", "google_default"}
)  # These values of gcsfs' `token` name a way to log in: they are not secret.
_SHORTEST = 4  # A shorter value would also match ordinary text.
HIDDEN = "***"
# In a URL: user and password, up to the last @, and everything after the question mark, such as a signature.
_IN_URL = re.compile(
    r"""(?<=://)[^\s"'/:@]*:[^\s"']*@|(?<=://)[^/\s@"']*@|[^/\s@:"']+:(?!//)[^\s"']+@|(?<=[\w/])\?[^\s"']+"""
)


class ClientError(Exception):
    """A client's exception as text without secrets; a traceback shows it as the cause of our error."""


class Redactor:
    """Removes the secret values of a store's options from texts and errors."""

    def __init__(self, options: Mapping[str, Any]):
        values = {value for name, value in _texts("", options) if _hides(name)}
        for _, text in _texts("", options):
            values |= _passwords(text)
        values = {value for text in values for value in (text, text.strip(), quote(text, safe=""), unquote(text))}
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without the secrets."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return without_secrets(text)

    def cause(self, error: BaseException) -> ClientError:
        """Replace a client's error and all its causes by a ClientError."""
        kind = type(error)
        return ClientError(self.text(f"{kind.__module__}.{kind.__qualname__}: {error}"))


def without_secrets(text: str) -> str:
    """Return a text without the users, passwords and signatures of the URLs in it."""
    return _IN_URL.sub("", text)


def secret_options(options: Mapping[str, Any] | None, where: str = "storage_options") -> list[str]:
    """List the paths of options that hold secrets."""
    paths = []
    for path, text in _texts(where, options or {}):
        name = path.rpartition(".")[2]
        if (name in SECRET_OPTIONS and text not in _PUBLIC_TOKENS) or without_secrets(text) != text:
            paths.append(path)
    return [*dict.fromkeys(paths)]


def _hides(path: str) -> bool:
    return any(part in SECRET_OPTIONS or part in _NAMES_OF_KEYS for part in path.split("."))


def _passwords(text: str) -> set[str]:
    """Return the secret parts of a URL or a connection string."""
    secrets = set()
    if "://" in text and "@" in text:
        secrets |= {*text.partition("://")[2].rpartition("@")[0].partition(":")[::2]}
    if "?" in text:
        secrets.add(urlsplit(text).query)
    for part in text.split(";"):
        name, _, value = part.partition("=")
        if name.strip().lower() in ("accountkey", "sharedaccesssignature"):
            secrets.add(value)
    return secrets


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for every text in nested options."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{where}.{key}" if where else str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(where, item)
    elif isinstance(value, str):
        yield where, value
