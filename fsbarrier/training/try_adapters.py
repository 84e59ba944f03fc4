"""Puts the adapters that a run asks for into its model, which has no weights here, and does nothing else.

`python -m fsbarrier.training.try_adapters FOLDER RANK [TARGET]...`
Exit code 2 and one line on stderr where it cannot be done; libraries may print something before that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import LoraSettings
from fsbarrier.training.lora import Adapters
from fsbarrier.training.policy import architecture


def main(arguments: Sequence[str]) -> int:
    folder, rank, *targets = arguments
    lora = LoraSettings(rank=int(rank), targets=tuple(targets))
    try:
        Adapters.put_into(architecture(Path(folder)), lora, Path(folder))
    except UsageError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
