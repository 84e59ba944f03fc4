"""What a start of our own programs costs, forked from the daemon's template and started anew, in turn (docs/decisions/0021).

python scripts/bench_fork.py                                     start to end of programs that only say how they are called
python scripts/bench_fork.py --modules fsbarrier.workers.toy --repeats 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsbarrier.supervision.supervisor import Child, with_this_package
from fsbarrier.supervision.template import ForkedGuard, Template

DEFAULT = ("fsbarrier.workers.toy", "fsbarrier.workers.prepare")
LIMIT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", nargs="+", default=DEFAULT, help="programs (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind (default: %(default)s)")
    args = parser.parse_args()
    print(f"{'program':<32} {'forked s':>10} {'anew s':>10} {'ratio':>7}   medians of {args.repeats}")
    with tempfile.TemporaryDirectory() as folder:
        template = Template(args.modules, work_dir=Path(folder), log_file=Path(folder, "template.log"))
        template.load()
        try:
            for module in args.modules:
                wait_until_it_forks(module, template, Path(folder))
                both = [
                    (seconds(module, template, Path(folder)), seconds(module, None, Path(folder)))
                    for _ in range(args.repeats)
                ]
                forked, anew = (statistics.median(times) for times in zip(*both, strict=True))
                print(f"{module:<32} {forked:>10.3f} {anew:>10.3f} {anew / forked:>7.1f}", flush=True)
        finally:
            template.stop()
    return 0


def start(module: str, template: Template | None, folder: Path) -> Child:
    argv = [sys.executable, "-P", "-m", module, "--help"]
    env = with_this_package(os.environ)
    return Child.start(argv, env=env, log_file=folder / "log", name=module, template=template)


def seconds(module: str, template: Template | None, folder: Path) -> float:
    begin = time.monotonic()
    with start(module, template, folder) as child:
        code = child.wait(LIMIT_S)
        if code != 0 or forked(child) is (template is None):
            sys.exit(f"{module} ended with {code}:\n" + "\n".join(child.last_log_lines()))
    return time.monotonic() - begin


def wait_until_it_forks(module: str, template: Template, folder: Path) -> None:
    """Until the template has imported everything: before that, programs are started anew."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with start(module, template, folder) as child:
            child.wait(LIMIT_S)
            if forked(child):
                return
        if time.monotonic() > deadline:
            sys.exit("the template does not come up:\n" + (folder / "template.log").read_text())


def forked(child: Child) -> bool:
    return isinstance(child._guard, ForkedGuard)


if __name__ == "__main__":
    sys.exit(main())
