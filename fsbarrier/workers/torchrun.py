"""Runs torchrun with a rendezvous store on a socket that the daemon holds; torch's own store listens on all addresses of the host.

`python -m fsbarrier.workers.torchrun` takes torchrun's flags. It replaces torch's static rendezvous, which creates the store.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.run import main

from fsbarrier.network.listening import LISTENING, listen, port_of, take


class OneAddress(static_tcp_rendezvous.StaticTCPRendezvous):
    """torch's static rendezvous with a store that listens on one address."""

    _store: Store | None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            held = [socket.socket(fileno=int(fd)) for fd in os.environ.pop(LISTENING, "").split(",") if fd]
            chosen = take(held or listen((self.master_addr,), self.master_port), self.master_addr)
            if chosen.getsockname()[0] != self.master_addr:
                print(
                    f"{self.master_addr} is not an address of this host, so the store listens on all addresses",
                    flush=True,
                )
            # 0: the processes of one node meet on any free port.
            self.master_port = port_of(chosen)
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                True,
                self.timeout,
                multi_tenant=True,
                # The store closes the socket.
                master_listen_fd=chosen.detach(),
            )
        return super().next_rendezvous()


if __name__ == "__main__":
    # Like -P, for child processes: a random.py in the current directory must not shadow Python's.
    os.environ["PYTHONSAFEPATH"] = "1"
    # torchrun looks up the class under this name.
    static_tcp_rendezvous.StaticTCPRendezvous = OneAddress  # type: ignore[misc]
    sys.exit(main())
