"""A dstack task: the same command on each of its nodes."""

from __future__ import annotations

import shlex

from fsbarrier.launchers.job import MARK, Job, Machine, quoted

_TASK = """\
{mark} Start it with: dstack apply -f FILE
type: task
name: {name}
nodes: {nodes}
image: {image}
working_dir: {mount}
# The rank comes from DSTACK_NODE_RANK, which dstack sets.
commands:
  - {command}
{resources}# A folder that every instance of the fleet has mounted, or a network volume's name.
volumes:
  - {volume}
"""


def task_file(job: Job, machine: Machine) -> str:
    """The text of the file."""
    return _TASK.format(
        mark=MARK,
        name=quoted(job.name),
        nodes=job.nodes,
        image=quoted(machine.image),
        mount=quoted(machine.mount),
        # dstack puts values in the place of ${{ NAME }}; $$ stands for $.
        command=quoted(shlex.join(["exec", *job.run, *job.words]).replace("$", "$$")),
        resources=f"resources:\n  gpu: {job.gpus_per_node}\n" if job.gpus_per_node else "",
        volume=quoted(f"{machine.volume}:{machine.mount}"),
    )
