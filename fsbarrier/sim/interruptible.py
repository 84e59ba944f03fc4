"""A call that can be held up in the middle: it runs in a thread of its own, but never at the same time as its caller."""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from threading import Lock

from fsbarrier.sim.faults import Crash


class InterruptibleCall:
    """`go_on` runs `call` until it parks or ends; deterministic, since exactly one side runs at any time."""

    def __init__(self, call: Callable[[], str]) -> None:
        self.inside = False
        self.result = ""
        self._call, self._done, self._killed = call, False, False
        self._error: BaseException | None = None
        # Each is held until its side is to run.
        self._go, self._back = Lock(), Lock()
        self._go.acquire()
        self._back.acquire()
        start_new_thread(self._main, ())

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self.result = self._call()
        # `go_on` raises it again, in the caller's thread.
        except BaseException as error:
            self._error = error
        self._done = True
        self._back.release()

    def go_on(self) -> bool:
        """Called outside: True when the call has ended, and `result` is what it gave."""
        self.inside = True
        self._go.release()
        self._back.acquire()
        self.inside = False
        if self._error is not None:
            raise self._error
        return self._done

    def park(self) -> None:
        """Called inside: hand over until the next `go_on`. Raises Crash where there is none any more."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Crash

    def kill(self) -> None:
        """Called outside: end the call where it stands."""
        self._killed = True
        if not self._done:
            self.go_on()
