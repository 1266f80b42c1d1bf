"""Secrets in options and URLs, and in the messages of clients that repeat them.

`Redactor` is used where errors of clients become ours. It knows the secret values that the client was given, so it
finds them in any message; it also removes what looks like a password in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

__all__ = ["ClientError", "Redactor", "secret_options", "without_secret_arguments", "without_secrets"]

_SECRET_OPTIONS = frozenset({
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
)  # gcsfs: values of `token` that name a way to log in
_SHORTEST = 4  # a shorter value would match in every text
_HIDDEN = "***"
# In a URL: user and password up to the last @, and everything after the question mark (a signature).
_IN_URL = re.compile(
    r"""(?<=://)[^\s"'/:@]*:[^\s"']*@|(?<=://)[^/\s@"']*@|[^/\s@:"']+:(?!//)[^\s"']+@|(?<=[\w/])\?[^\s"']+"""
)

_WORDS_OF_SECRETS = frozenset({
    "apikey",
    "auth",
    "authorization",
    "bearer",
    "cookie",
    "credential",
    "credentials",
    "dsn",
    "key",
    "pass",
    "passphrase",
    "passwd",
    "password",
    "pat",
    "pwd",
    "sas",
    "secret",
    "secrets",
    "signature",
    "token",
    "user",
    "webhook",
})  # fmt: skip
_PUBLIC_NAMES = frozenset({"run_key", "run-key"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
# A name that is followed by a value: name=…, name: …, "name": …, and Bearer ….
_NAMED = re.compile(rf"""(?P<name>{_NAME.pattern})(?:["']?\s*[=:]\s*["']?|(?<=[Bb]earer)\s+)""")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A key or a token as services make them: one long word of letters and digits.
_RANDOM = re.compile(r"(?=[A-Za-z+=]*[0-9])(?=[0-9+=]*[A-Za-z])[A-Za-z0-9+=]{20,}")


class ClientError(Exception):
    """A client's exception as text without secrets: the cause of our error in a traceback."""


class Redactor:
    """Remove the secrets of some options from texts and errors."""

    def __init__(self, options: Mapping[str, Any]):
        values = {value for name, value in _texts("", options) if _hides(name)}
        for _, text in _texts("", options):
            values |= _passwords(text)
        values = {value for text in values for value in (text, text.strip(), quote(text, safe=""), unquote(text))}
        self._values = sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without the secrets."""
        for value in self._values:
            text = text.replace(value, _HIDDEN)
        return without_secrets(text)

    def cause(self, error: BaseException) -> ClientError:
        """Return a ClientError in place of a client's error and all of its causes."""
        kind = type(error)
        return ClientError(self.text(f"{kind.__module__}.{kind.__qualname__}: {error}"))


def without_secrets(text: str) -> str:
    """Return a text without the users, passwords and signatures of the URLs in it."""
    return _IN_URL.sub("", text)


def without_secret_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets; in doubt, remove more.

    Hidden are what follows the name of a secret (--token=…, TOKEN=…, "token": …, --token …), users and passwords of
    URLs, and what looks like a key: 20 or more letters and digits in one word. The words of a name decide:
    `api-key` and `HF_TOKEN` name secrets, `max_tokens` does not.
    """
    shown, hides_next = [], False
    for argument in arguments:
        text = _HIDDEN if hides_next else _without_named(without_secrets(argument))
        shown.append(_RANDOM.sub(_HIDDEN, text))
        hides_next = not hides_next and _is_of_a_secret(argument.lstrip("-"))
    return shown


def _without_named(argument: str) -> str:
    """Cut an argument off after the first name of a secret that has a value."""
    for match in _NAMED.finditer(argument):
        if _is_of_a_secret(match["name"]):
            return argument[: match.end()] + _HIDDEN
    return argument


def _is_of_a_secret(name: str) -> bool:
    words = {word.lower() for word in _WORD.findall(name)} if _NAME.fullmatch(name) else set()
    return name not in _PUBLIC_NAMES and not words.isdisjoint(_WORDS_OF_SECRETS)


def secret_options(options: Mapping[str, Any] | None, where: str = "storage_options") -> list[str]:
    """List the paths of options that hold secrets."""
    paths = []
    for path, text in _texts(where, options or {}):
        name = path.rpartition(".")[2]
        if (name in _SECRET_OPTIONS and text not in _PUBLIC_TOKENS) or without_secrets(text) != text:
            paths.append(path)
    return [*dict.fromkeys(paths)]


def _hides(path: str) -> bool:
    return any(part in _SECRET_OPTIONS or part in _NAMES_OF_KEYS for part in path.split("."))


def _passwords(text: str) -> set[str]:
    """Return the parts of a text that are secret as a URL's or a connection string's."""
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
    """Yield (path, text) for every text in the options."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{where}.{key}" if where else str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(where, item)
    elif isinstance(value, str):
        yield where, value
