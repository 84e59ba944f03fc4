"""A node's helper process: it does the jobs of helper programs one after the other, so their libraries (torch) are imported once.

`python -m fsbarrier.workers.helper --spec SPEC.json`; in the spec's file, `module` names the program whose function `work` does the job.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

from fsbarrier.processes.worker_contract import ProgressWriter, run_worker
from fsbarrier.protocol.facts import JsonObject
from fsbarrier.settings.sections import Settings


def main(spec: JsonObject, settings: Settings, progress: ProgressWriter) -> Mapping[str, object] | None:
    report: Mapping[str, object] | None = importlib.import_module(spec["module"]).work(
        spec, settings, progress
    )
    return report


if __name__ == "__main__":
    sys.exit(run_worker(main, lambda: True))
