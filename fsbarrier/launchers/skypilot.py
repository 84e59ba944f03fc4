"""Writes a SkyPilot task that runs the same command on each node."""

from __future__ import annotations

import shlex

from fsbarrier.launchers.job import MARK, ClusterJob, Machine, quoted

_TASK = """\
{mark} Start it with: sky launch FILE
name: {name}
num_nodes: {nodes}
resources:
  image_id: {image}
{accelerators}volumes:
  {mount}: {volume}
# fsbarrier takes the rank from SKYPILOT_NODE_RANK.
run: {run}
"""


def task_file(job: ClusterJob, machine: Machine, accelerator: str) -> str:
    """The text of the file. `accelerator`: SkyPilot's name of the accelerator type, such as H100."""
    accelerators = (
        f"  accelerators: {quoted(f'{accelerator}:{job.gpus_per_node}')}\n" if job.gpus_per_node else ""
    )
    return _TASK.format(
        mark=MARK,
        name=quoted(job.name),
        nodes=job.nodes,
        image=quoted(f"docker:{machine.image}"),
        accelerators=accelerators,
        mount=quoted(machine.mount),
        volume=quoted(machine.volume),
        # The command is a quoted scalar because an argument may contain line breaks.
        run=quoted(f"cd {shlex.quote(machine.mount)} && exec {shlex.join([*job.run, *job.words])}"),
    )
