"""`python -m fsbarrier` is the same as the command `fsbarrier`."""

from __future__ import annotations

import sys

from fsbarrier.cli import main

if __name__ == "__main__":
    sys.exit(main())
