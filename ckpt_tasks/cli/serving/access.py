"""Access to the page: pages of other sites and other users of the network must not read the runs.

Without a token, the server answers only requests whose Host header names this machine. This rule stops DNS rebinding: a
foreign site that points its own name to this machine. With a token, every request must contain the token: in the
address (once; then the browser keeps the token in a cookie), or as `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import unquote

_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """The access rules of one server: its address, its port, and the token that a request needs."""

    host: str
    port: int
    token: str | None = None

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token; the name has the port, since all ports of a host share cookies."""
        return f"ckpt_serve_{self.port}"

    def refusal(self, headers: Message, given: str | None) -> tuple[int, str] | None:
        """Return status and text for a refused request, or None; `given` is the token in the request's address."""
        if self.token is None:
            name = _name_of(headers.get("Host", ""))
            return None if name in {*_NAMES, self.host} else (421, f"this server is not {name!r:.100}")
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            kept = SimpleCookie(headers.get("Cookie", "")).get(self.cookie)
        except CookieError:
            kept = None
        tokens = (given, bearer, unquote(bearer), unquote(kept.value) if kept else None)
        if any(hmac.compare_digest(one.encode(), self.token.encode()) for one in tokens if one):
            return None
        return 401, "this server needs its token: open the address that ckpt serve printed"


def guarded(app: Any, access: Access) -> Any:
    """Return a WSGI application that answers as `app`, but refuses what `access` refuses."""

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        headers = Message()
        headers["Host"] = environ.get("HTTP_HOST", "")
        if refused := access.refusal(headers, None):
            status, text = refused
            start_response(f"{status} Refused", [("Content-Type", "text/plain; charset=utf-8")])
            return [text.encode()]
        return app(environ, start_response)

    return answer


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
