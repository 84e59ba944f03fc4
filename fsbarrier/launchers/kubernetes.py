"""A Kubernetes Job of one pod a node: indexed, so that each pod has a rank and a replacement gets the same one."""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.launchers.job import MARK, Job, Machine, quoted

#: So many times a node may be replaced.
_REPLACEMENTS = 100

_JOB = """\
{mark} Submit it with: kubectl apply -f FILE
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimitPerIndex: {replacements}
  podFailurePolicy:
    rules:
      # Usage, the program of a phase, too few nodes: another pod would fail in the same way.
      - action: FailJob
        onExitCodes:
          operator: In
          values: [2, 4, 5]
  template:
    metadata:
      labels:
        fsbarrier-run: {name}
    spec:
      restartPolicy: Never
      # A node has a minute to end its programs.
      terminationGracePeriodSeconds: 60
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - topologyKey: kubernetes.io/hostname
              labelSelector:
                matchLabels:
                  fsbarrier-run: {name}
      containers:
        - name: node
          image: {image}
          workingDir: {mount}
          # The rank comes from JOB_COMPLETION_INDEX, which Kubernetes sets.
          command: [{command}]
          args: [{args}]
{resources}          volumeMounts:
            - name: shared
              mountPath: {mount}
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: {volume}
        # Accelerators talk to each other through shared memory; a container's default of 64 MiB is too little.
        - name: shm
          emptyDir:
            medium: Memory
"""
_RESOURCES = """\
          resources:
            limits:
              nvidia.com/gpu: {gpus}
"""


def job_file(job: Job, machine: Machine) -> str:
    """The text of the file."""
    return _JOB.format(
        mark=MARK,
        name=quoted(job.name),
        nodes=job.nodes,
        replacements=_REPLACEMENTS,
        image=quoted(machine.image),
        mount=quoted(machine.mount),
        volume=quoted(machine.volume),
        command=_quoted_words(job.run),
        args=_quoted_words(job.words),
        resources=_RESOURCES.format(gpus=job.gpus_per_node) if job.gpus_per_node else "",
    )


def _quoted_words(words: Sequence[str]) -> str:
    # Kubernetes puts variables in the place of $(NAME); $$ stands for $.
    return ", ".join(quoted(word.replace("$", "$$")) for word in words)
