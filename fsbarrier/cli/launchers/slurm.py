"""`fsbarrier launch slurm`: writes a batch script with one task per node, which Slurm can requeue, and submits it.

Slurm signals the batch script some minutes before the time limit. The script then asks the run to stop at its next safe point and
requeues the job, which resumes the run. A failed node does not end the job (`--no-kill`), because the run continues with the others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from fsbarrier.cli.launchers.job import ClusterJob, fill
from fsbarrier.errors import ProgramFailed, UsageError


def batch_script(job: ClusterJob, *, time_limit: str | None, warn_s: int, extra: Sequence[str]) -> str:
    """The text of the file. `extra`: additional sbatch options, such as `--partition=gpu`. Raises UsageError."""
    options = (*([f"--time={time_limit}"] if time_limit else []), *extra)
    for option in (*options, f"--chdir={job.folder}"):
        if not option.startswith("--") or any(character in option for character in "\n\r"):
            raise UsageError(
                f"--sbatch {option!r}: must be a single sbatch option that begins with --, such as --partition=gpu"
            )
    return fill("slurm.sh.jinja", job, options=options, warn_s=warn_s)


def sbatch(path: Path) -> str:
    """Submit the file with sbatch and return the job's number. Raises UsageError (no sbatch here), ProgramFailed (sbatch failed)."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            f"launch slurm: no sbatch on this machine; wrote {path}, submit it on a machine with Slurm"
        ) from None
    if done.returncode != 0:
        raise ProgramFailed(f"sbatch {path}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    # On some systems the cluster's name follows.
    return done.stdout.strip().partition(";")[0]
