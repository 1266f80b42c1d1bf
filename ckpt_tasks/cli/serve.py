"""`ckpt serve`: a page of all runs below a directory."""

from __future__ import annotations

import os
import secrets
import webbrowser
from contextlib import suppress
from typing import Annotated

from ckpt_tasks.cli.arguments import JsonOption, argument, complete_run, option
from ckpt_tasks.cli.output import output
from ckpt_tasks.errors import ConfigError

_TOKEN = "CKPT_SERVE_TOKEN"  # noqa: S105 (a variable's name)

RootArgument = Annotated[str, argument("ROOT", "a directory that holds runs, or a run", complete_run)]
PortOption = Annotated[int, option("--port", "N", "the port; 0: any that is free")]
HostOption = Annotated[str, option("--host", "ADDRESS", "listen at this address; others than this host need a token")]
OpenOption = Annotated[bool, option("--open", None, "open the page in a browser")]


def serve(
    root: RootArgument,
    *,
    port: PortOption = 8123,
    host: HostOption = "127.0.0.1",
    show: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a page of all runs.

    A live table with search, curves of chosen runs over each other, and all that a report says of a run, until Ctrl-C.
    It only reads, and works without a network. /metrics has the runs' metrics for Prometheus. At an address that others
    can reach, every request needs a token: that of the variable CKPT_SERVE_TOKEN, or one that is made and printed.
    --json prints the table and ends.
    """
    from ckpt_tasks.serving.access import is_loopback
    from ckpt_tasks.serving.server import PageServer
    from ckpt_tasks.serving.table import RunTable
    from ckpt_tasks.storage.locations import Location

    with output(as_json) as out:
        table = RunTable(Location(root).open())
        if as_json:
            table.look()
            out.answer({name: value for name, value in table.since(-1).items() if name in ("root", "rows", "error")})
            out.fail(bool(table.error))
            return
        token = os.environ.get(_TOKEN) or (None if is_loopback(host) else secrets.token_urlsafe(24))
        try:
            server = PageServer(table, host, port, token)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened at: {error}", hint="--port 0 takes a free one."
            ) from error
        address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        address += f"?token={token}" if token else ""
        out.print(f"Serving {table.root.url} at {address} until Ctrl-C.")
        table.start()
        if show:
            webbrowser.open(address)
        with server, suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.1)
