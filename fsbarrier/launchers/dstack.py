"""Writes a dstack task that runs the same command on each node."""

from __future__ import annotations

import shlex

from fsbarrier.launchers.job import MARK, ClusterJob, Machine, quoted

_TASK = """\
{mark} Start it with: dstack apply -f FILE
type: task
name: {name}
nodes: {nodes}
image: {image}
working_dir: {mount}
# fsbarrier takes the rank from DSTACK_NODE_RANK.
commands:
  - {command}
{resources}# A folder mounted on every instance of the fleet, or the name of a network volume.
volumes:
  - {volume}
"""


def task_file(job: ClusterJob, machine: Machine) -> str:
    """The text of the file."""
    return _TASK.format(
        mark=MARK,
        name=quoted(job.name),
        nodes=job.nodes,
        image=quoted(machine.image),
        mount=quoted(machine.mount),
        # dstack expands ${{ NAME }}; $$ escapes $.
        command=quoted(shlex.join(["exec", *job.run, *job.words]).replace("$", "$$")),
        resources=f"resources:\n  gpu: {job.gpus_per_node}\n" if job.gpus_per_node else "",
        volume=quoted(f"{machine.volume}:{machine.mount}"),
    )
