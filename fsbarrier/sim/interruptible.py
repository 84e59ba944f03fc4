"""A call that can be paused in the middle. It runs in its own thread, but never at the same time as its caller."""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from threading import Lock

from fsbarrier.sim.faults import Crash


class InterruptibleCall:
    """`go_on` runs `call` until it parks or ends. Exactly one side runs at any time, so it is deterministic."""

    def __init__(self, call: Callable[[], str]) -> None:
        self.inside = False
        self.result = ""
        self._call, self._done, self._killed = call, False, False
        self._error: BaseException | None = None
        # Each lock is held while its side must not run.
        self._go, self._back = Lock(), Lock()
        self._go.acquire()
        self._back.acquire()
        start_new_thread(self._main, ())

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self.result = self._call()
        # `go_on` raises it again in the caller's thread.
        except BaseException as error:
            self._error = error
        self._done = True
        self._back.release()

    def go_on(self) -> bool:
        """Called from outside: continue the call; True if it has ended, with its `result`."""
        self.inside = True
        self._go.release()
        self._back.acquire()
        self.inside = False
        if self._error is not None:
            raise self._error
        return self._done

    def park(self) -> None:
        """Called from inside: wait for the next `go_on`. Raises Crash after `kill`."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Crash

    def kill(self) -> None:
        """Called from outside: end the call where it is."""
        self._killed = True
        if not self._done:
            self.go_on()
