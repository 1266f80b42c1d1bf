"""What must not be read by everyone: secrets in options and URLs, and the words of clients that repeat them.

`Redactor` stands at the boundary where errors of clients become ours. It knows the secret values that the client was
given, so it does not matter how a client words them; what looks like a password in a URL goes as well.
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
_PUBLIC_TOKENS = frozenset({"anon", "browser", "cache", "cloud", "google_default"})  # ways to log in, to gcsfs
_SHORTEST = 4  # what is shorter stands in every text
_HIDDEN = "***"
# In a URL: a user and a password up to the last @, and what stands after the question mark (a signature).
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
# A name, and that a value follows it: name=…, name: …, "name": …, and Bearer ….
_NAMED = re.compile(rf"""(?P<name>{_NAME.pattern})(?:["']?\s*[=:]\s*["']?|(?<=[Bb]earer)\s+)""")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A key or a token as services make them: long, letters and digits in one word.
_RANDOM = re.compile(r"(?=[A-Za-z+=]*[0-9])(?=[0-9+=]*[A-Za-z])[A-Za-z0-9+=]{20,}")


class ClientError(Exception):
    """What a client raised, in words without secrets: the cause of our error in a traceback."""


class Redactor:
    """Take the secrets of these options out of texts and errors."""

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
        """Return what stands for a client's error, and for all that is behind it."""
        kind = type(error)
        return ClientError(self.text(f"{kind.__module__}.{kind.__qualname__}: {error}"))


def without_secrets(text: str) -> str:
    """Return a text without the users, passwords and signatures of the URLs in it."""
    return _IN_URL.sub("", text)


def without_secret_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets, and rather without too much than with one.

    Hidden are what follows the name of a secret (--token=…, TOKEN=…, "token": …, --token …), users and passwords of
    URLs, and what looks like a key: 20 or more letters and digits in one word. A name is a secret's by its words:
    `api-key` and `HF_TOKEN` are, `max_tokens` is not.
    """
    shown, hides_next = [], False
    for argument in arguments:
        text = _HIDDEN if hides_next else _without_named(without_secrets(argument))
        shown.append(_RANDOM.sub(_HIDDEN, text))
        hides_next = not hides_next and _is_of_a_secret(argument.lstrip("-"))
    return shown


def _without_named(argument: str) -> str:
    """Cut an argument off behind the first name of a secret that a value follows."""
    for match in _NAMED.finditer(argument):
        if _is_of_a_secret(match["name"]):
            return argument[: match.end()] + _HIDDEN
    return argument


def _is_of_a_secret(name: str) -> bool:
    words = {word.lower() for word in _WORD.findall(name)} if _NAME.fullmatch(name) else set()
    return name not in _PUBLIC_NAMES and not words.isdisjoint(_WORDS_OF_SECRETS)


def secret_options(options: Mapping[str, Any] | None, where: str = "storage_options") -> list[str]:
    """List which options hold secrets, by their path."""
    found = []
    for path, text in _texts(where, options or {}):
        name = path.rpartition(".")[2]
        if (name in _SECRET_OPTIONS and text not in _PUBLIC_TOKENS) or without_secrets(text) != text:
            found.append(path)
    return [*dict.fromkeys(found)]


def _hides(path: str) -> bool:
    return any(part in _SECRET_OPTIONS or part in _NAMES_OF_KEYS for part in path.split("."))


def _passwords(text: str) -> set[str]:
    """Return the parts of a text that are secret as a URL's or a connection string's."""
    found = set()
    if "://" in text and "@" in text:
        found |= {*text.partition("://")[2].rpartition("@")[0].partition(":")[::2]}
    if "?" in text:
        found.add(urlsplit(text).query)
    for part in text.split(";"):
        name, _, value = part.partition("=")
        if name.strip().lower() in ("accountkey", "sharedaccesssignature"):
            found.add(value)
    return found


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text within options, and where it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{where}.{key}" if where else str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(where, item)
    elif isinstance(value, str):
        yield where, value
