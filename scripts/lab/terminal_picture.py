"""A picture of the live view, as SVG, for pages that show what people see.

python scripts/lab/terminal_picture.py RUN docs/live_view.svg     of the run in that directory, as it is now
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from fsbarrier.errors import FsbarrierError  # noqa: E402
from fsbarrier.view.live_view import frame  # noqa: E402
from fsbarrier.view.run_status import status_of, status_reader  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("out", type=Path, help="the SVG to write")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--height", type=int, default=30)
    args = parser.parse_args()
    try:
        svg = picture(args.run.resolve(), args.width, args.height)
    except FsbarrierError as error:
        parser.error(str(error))
    args.out.write_text(svg, encoding="utf-8")
    return 0


def picture(run: Path, width: int, height: int) -> str:
    reader = status_reader(run)
    now = time.monotonic()
    reader.poll(now)
    # Nothing is printed: the console keeps what it would print.
    console = Console(width=width, height=height, record=True, force_terminal=True, file=io.StringIO())
    console.print(frame(status_of(reader, now), reader, width, height))
    svg = console.export_svg(title="fsbarrier")
    # The fonts that rich names would be loaded from elsewhere.
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
