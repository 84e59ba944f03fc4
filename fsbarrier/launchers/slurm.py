"""Writes a Slurm batch file with one task per node that can be requeued.

Slurm signals the batch script some minutes before the time limit. The script then asks the run to stop at its next safe point and requeues
the job, which resumes the run. A failed node does not end the job (`--no-kill`), because the run continues with the others.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.launchers.job import MARK, ClusterJob

_SCRIPT = """\
#!/usr/bin/env bash
{options}
{mark} To change it, run that command again; to submit it by hand: sbatch FILE
set -uo pipefail
cd -- {folder} || exit 2

# Slurm sends this signal {warn_s} s before the time limit.
requeue=no
trap 'requeue=yes; {stop}' USR1

# Each task takes its rank from SLURM_NODEID. A failed task must not end the others: the nodes can continue without it.
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \\
  {run} &
step=$!
while true; do
  wait "$step"
  code=$?
  # A signal interrupts the wait, not the step.
  kill -0 "$step" 2>/dev/null || break
done
if [ "$requeue" = yes ]; then
  wait "$step"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""


def batch_file(job: ClusterJob, *, time_limit: str | None, warn_s: int, extra: Sequence[str]) -> str:
    """The text of the file. `extra`: additional sbatch options, such as `--partition=gpu`. Raises UsageError."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--signal=B:USR1@{warn_s}",
        f"--output={job.name}-%j.log",
        f"--chdir={shlex.quote(str(job.folder))}",
    ]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if time_limit:
        options.append(f"--time={time_limit}")
    for option in (*options, *extra):
        if not option.startswith("--") or any(character in option for character in "\n\r"):
            raise UsageError(
                f"--sbatch {option!r}: must be a single sbatch option that begins with --, such as --partition=gpu"
            )
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in (*options, *extra)),
        mark=MARK,
        folder=shlex.quote(str(job.folder)),
        warn_s=warn_s,
        # This ends up inside the single quotes of the trap.
        stop=shlex.join([*job.stop, "--log-path", job.log_path]).replace("'", "'\\''"),
        run=shlex.join([*job.run, *job.words]),
    )


def submit(path: Path) -> str:
    """Submit the file with sbatch and return its output. Raises UsageError (no sbatch here), ProgramFailed (sbatch failed)."""
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError(
            f"launch slurm: no sbatch on this machine; wrote {path}, submit it on a machine with Slurm"
        ) from None
    if done.returncode != 0:
        raise ProgramFailed(f"sbatch {path}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
