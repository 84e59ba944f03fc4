"""torchrun with a rendezvous store that listens only on the leader's chosen address; torch's own listens on all addresses of the host.

`python -m fsbarrier.workers.torchrun` takes torchrun's flags. Replaces the static rendezvous, which creates the store, to pass it a socket.
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, static_tcp_rendezvous
from torch.distributed.run import main

from fsbarrier.host.rendezvous import listen_on


class OneAddress(static_tcp_rendezvous.StaticTCPRendezvous):
    """torch's static rendezvous with a store that listens on one address."""

    _store: Store | None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                True,
                self.timeout,
                multi_tenant=True,
                # The store closes it.
                master_listen_fd=self._listen().detach(),
            )
        return super().next_rendezvous()

    def _listen(self) -> socket.socket:
        try:
            return listen_on(self.master_addr, self.master_port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        print(
            f"{self.master_addr} is not an address of this host, so the store listens on all addresses",
            flush=True,
        )
        return listen_on("", self.master_port)


if __name__ == "__main__":
    # Like -P, for child processes: a random.py in the current directory must not shadow Python's.
    os.environ["PYTHONSAFEPATH"] = "1"
    # torchrun looks up the class under this name.
    static_tcp_rendezvous.StaticTCPRendezvous = OneAddress
    sys.exit(main())
