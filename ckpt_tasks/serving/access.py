"""Access to the page: a page of another site must not read the runs, nor may another user of the network.

A browser sends the host name that it was asked to open. A site that points its own name to this machine (DNS rebinding)
is recognised by that name: requests are answered only under names of this machine. With a token, every request needs
it: in the address (once; then the browser keeps it in a cookie), or as `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from email.message import Message
from http.cookies import CookieError, SimpleCookie

_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """The access rules of one server: its address, its port, and the token that a request needs."""

    host: str
    port: int
    token: str | None = None

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token; it has the port, since all ports of a host share cookies."""
        return f"ckpt_serve_{self.port}"

    def refusal(self, headers: Message, given: str | None) -> tuple[int, str] | None:
        """Return status and text for a refused request, or None; `given` is the token in its address."""
        if self.token is None:
            name = _name_of(headers.get("Host", ""))
            return None if name in {*_NAMES, self.host} else (421, f"this server is not {name!r:.100}")
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            kept = SimpleCookie(headers.get("Cookie", "")).get(self.cookie)
        except CookieError:
            kept = None
        tokens = (given, bearer, kept.value if kept else None)
        if any(hmac.compare_digest(one.encode(), self.token.encode()) for one in tokens if one):
            return None
        return 401, "this server needs its token: open the address that ckpt serve printed"


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
