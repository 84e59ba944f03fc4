"""An HTTP server's protocol that serves only this user: connections of other users of this machine are closed at once.

They could otherwise use up the process's file descriptors, or try keys.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fsbarrier.network.listening import AT_ONCE, stranger


class OwnUserOnly(H11Protocol):
    """The protocol for uvicorn. Prints the first connection of each other user. Subclasses (`own_user_only`) say what is served."""

    what = ""
    told: set[str]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        whose = stranger(peer, transport.get_extra_info("sockname"))
        if not whose:
            return
        transport.abort()
        # There is no peer if it has left already.
        if peer and whose not in self.told:
            self.told.add(whose)
            print(f"{self.what}: closed a connection of {whose} (from {peer[0]}:{peer[1]})", flush=True)


def own_user_only(what: str) -> type[OwnUserOnly]:
    """The protocol of one server, which is called `what` in its messages."""
    return type("OwnUserOnly", (OwnUserOnly,), {"what": what, "told": set()})


def own_user_config(application: Any, what: str, **more: Any) -> uvicorn.Config:
    """The configuration of a server of ours: for this user only, with a bound on waiting connections, and silent but for errors.

    `more`: further arguments of uvicorn.Config.
    """
    return uvicorn.Config(
        application,
        http=own_user_only(what),
        log_config=None,
        log_level="error",
        access_log=False,
        backlog=AT_ONCE,
        server_header=False,
        **more,
    )
