"""What plain output says about work in progress while nothing happens for a while, as when vLLM starts. Pure."""

from __future__ import annotations

from fsbarrier.rundir.journal import Fields, number, text
from fsbarrier.wording import amount, one_line

#: How long the output may be silent, in seconds: first, and at most; the pause doubles after each line about work in progress.
FIRST_S, MOST_S = 20.0, 320.0


class Silence:
    """Decides when a line about work in progress is due. `now`: monotonic time."""

    def __init__(self, now: float) -> None:
        self._said_at, self._pause_s = now, FIRST_S

    def broken(self, now: float) -> None:
        """Begin to count anew, because something else was printed."""
        self._said_at, self._pause_s = now, FIRST_S

    def due(self, now: float) -> bool:
        """Whether a line is due; the next one then is after twice as long."""
        if now - self._said_at < self._pause_s:
            return False
        self._said_at, self._pause_s = now, min(MOST_S, 2 * self._pause_s)
        return True


def progress_text(progress: Fields) -> str:
    """A node's progress in its phase: how much is done, the mean reward so far, and what it waits for; "" if it says nothing."""
    done, total, reward = (number(progress, name) for name in ("done", "total", "reward_mean"))
    parts = [
        f"{done:.0f} of {total:.0f}" if done is not None and total else "",
        f"reward {amount(reward)}" if reward is not None else "",
        one_line(text(progress, "note")),
    ]
    return ", ".join(filter(None, parts))
