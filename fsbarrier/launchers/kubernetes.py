"""Writes an indexed Kubernetes Job with one pod per node. The index is the rank, and a replacement pod keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from fsbarrier.launchers.job import MARK, ClusterJob, Machine, quoted

#: how often a node may be replaced
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
      # Usage error, failed program, too few nodes: a replacement pod would fail in the same way.
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
      # A node gets a minute to stop its programs.
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
          # fsbarrier takes the rank from JOB_COMPLETION_INDEX.
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
        # NCCL uses shared memory; the container default of 64 MiB is too small.
        - name: shm
          emptyDir:
            medium: Memory
"""
_RESOURCES = """\
          resources:
            limits:
              nvidia.com/gpu: {gpus}
"""


def job_file(job: ClusterJob, machine: Machine) -> str:
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
    # Kubernetes expands $(NAME); $$ escapes $.
    return ", ".join(quoted(word.replace("$", "$$")) for word in words)
