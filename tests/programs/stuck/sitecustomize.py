"""Put on a daemon's PYTHONPATH: its reads of the shared directory hang for as long as the file $STUCK exists, its writes do not."""

import os
import sys
import threading
from pathlib import Path

if "fsbarrier" in sys.orig_argv and "run" in sys.orig_argv:
    from fsbarrier.rundir.record_store import PosixStore

    names = PosixStore.names

    def hanging(self: PosixStore, directory: Path) -> list[str]:
        while Path(os.environ["STUCK"]).exists():
            threading.Event().wait(0.05)
        return names(self, directory)

    PosixStore.names = hanging
