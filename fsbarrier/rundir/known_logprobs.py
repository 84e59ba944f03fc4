"""Log-probabilities that the trainer computed with the weights of a policy version. An engine that has loaded these weights must compute
the same.

    checkpoints/policy-000006.g0003/logprobs.json   some sequences of the batch that the version was trained on; listed in the manifest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsbarrier.errors import ProgramFailed
from fsbarrier.rundir import checkpoints

NAME = "logprobs.json"
# With fewer tokens than this, a few outliers look like a fault.
ENOUGH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KnownSequence:
    """A sequence. `logprobs`: each token's log-probability given those before it, at temperature 1; None: the token is not compared."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class KnownLogprobs:
    """Sequences with the trainer's log-probabilities. `limit`: the largest mean difference that precision explains."""

    limit: float
    sequences: tuple[KnownSequence, ...]

    def encode(self) -> bytes:
        """The content of its file."""
        return msgspec.json.encode(self)

    def gap(self, computed: Sequence[Sequence[float]]) -> float:
        """The mean difference from an engine's log-probabilities (`computed`: one for each token of each sequence). If fewer than
        `ENOUGH_TOKENS` tokens are compared, the missing ones count as equal."""
        pairs = zip(self.sequences, computed, strict=True)
        apart = [
            abs(expected - actual)
            for known, row in pairs
            for expected, actual in zip(known.logprobs, row, strict=True)
            if expected is not None
        ]
        return sum(apart) / max(len(apart), ENOUGH_TOKENS)


def read(folder: Path) -> KnownLogprobs | None:
    """Read a complete policy version's known log-probabilities; None if its trainer wrote none. Raises ProgramFailed."""
    data = checkpoints.read_listed(folder, NAME)
    try:
        return None if data is None else msgspec.json.decode(data, type=KnownLogprobs)
    except (ValueError, RecursionError) as error:
        raise ProgramFailed(f"{folder / NAME} is not what a trainer writes: {error}") from None
