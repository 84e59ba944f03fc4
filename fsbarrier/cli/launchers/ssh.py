"""`fsbarrier launch ssh`: runs the nodes on other machines, through the system's ssh.

Each node's output is stored in a local file; node 0's output also goes to the terminal. Ctrl-C stops all nodes. A node also stops when this
process ends or its connection breaks: on each machine a short shell script stops the node on EOF of its standard input.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsbarrier.cli.launchers.job import ClusterJob
from fsbarrier.cli.launchers.processes import Children, coming_generation, failed_to_begin, run_nodes
from fsbarrier.errors import TooFewNodes, UsageError
from fsbarrier.rundir.logs import Log, last_lines, show
from fsbarrier.wording import counted

Say = Callable[[str], None]
#: ssh's exit code for a failed connection
NO_CONNECTION = 255
#: what a pipe takes without a reader
PIPE_BYTES = 32 * 1024
#: The first line of a node's output. It distinguishes a lost connection from one that was never established.
CONNECTED = "fsbarrier: connected"
#: Disable prompts, which nobody could answer; give up on a machine after a minute without an answer.
OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=15", "ServerAliveCountMax=4")
# Runs on each machine: starts the node in its own process group and stops it on EOF.
_ON_EACH_MACHINE = f"""
echo "{CONNECTED}"
cd -- "$1" || exit 2
shift
# Each line of the launcher's is a variable NAME=VALUE.
variables=$1
shift
while [ "$variables" -gt 0 ]; do
  IFS= read -r line || exit 2
  export "$line"
  variables=$((variables - 1))
done
exec 3<&0
setsid "$@" </dev/null 3<&- &
node=$!
{{
  cat <&3 >/dev/null
  kill -s TERM -- "-$node" && sleep 20 && kill -s KILL -- "-$node"
}} >/dev/null 2>&1 &
watcher=$!
wait "$node"
code=$?
kill "$watcher"
exit "$code"
"""


def read_hosts(text: str | None) -> tuple[str, ...]:
    """Parse `a,b,user@c`; node 0 comes first. Raises UsageError."""
    hosts = [host.strip() for host in (text or "").split(",") if host.strip()]
    for host in hosts:
        # The user's ssh configuration may pass a host name to a shell (ProxyCommand, Match exec).
        if not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:%@/+\[\]-]*", host) or "@-" in host:
            raise UsageError(f"--hosts: {host!r} is not a valid host; use HOST or USER@HOST")
    if not hosts:
        raise UsageError("launch ssh: give --hosts a,b,c")
    return tuple(hosts)


def commands(job: ClusterJob, hosts: Sequence[str], ssh: Sequence[str]) -> list[list[str]]:
    """The ssh command of each node, by rank."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    argvs = []
    for rank, host in enumerate(hosts):
        node = ["env", f"NODE_RANK={rank}", f"NNODES={len(hosts)}", *job.run, *job.words]
        # ssh passes a single string to the remote shell, so every word is quoted.
        script = shlex.join(
            ["sh", "-c", _ON_EACH_MACHINE, "fsbarrier-node", str(job.folder), str(len(job.env)), *node]
        )
        argvs.append([*ssh, *options, host, script])
    return argvs


def run_all(job: ClusterJob, hosts: Sequence[str], ssh: Sequence[str], logs: Path, say: Say) -> int:
    """Start all nodes and wait for them; returns one exit code for all. Raises UsageError, StoreError."""
    from fsbarrier.processes.supervisor import Child

    values = "".join(f"{name}={os.environ[name]}\n" for name in job.env).encode()
    if values.count(b"\n") > len(job.env) or len(values) > PIPE_BYTES:
        raise UsageError(
            f"--env: a value of {', '.join(job.env)} has several lines, or is too long for ssh's standard input"
        )

    def start(children: Children) -> None:
        for rank, command in enumerate(commands(job, hosts, ssh)):
            # Its other end stays open as long as this process lives. Values go this way because everybody can read command lines.
            stdin, kept = os.pipe()
            os.write(kept, values)
            argv = ["sh", "-c", f'exec "$@" </dev/fd/{stdin}', "sh", *command]
            log, name = logs / f"node_{rank}.log", f"node {rank} on {hosts[rank]}"
            children[rank] = Child.start(argv, log_file=log, name=name, pass_fds=(stdin,))
            os.close(stdin)
        say(
            f"started {counted(len(children), 'node')} on {', '.join(hosts)}, output in {logs}; Ctrl-C stops them"
        )

    generation = coming_generation(Path(job.log_path))
    return run_nodes(start, lambda children: _follow(children, hosts, generation, say), say)


def _follow(children: Children, hosts: Sequence[str], generation: Path, say: Say) -> Mapping[int, int]:
    """Show node 0's output until all nodes have ended. Returns the exit codes of the nodes that ended by themselves.

    If a node fails to start, the others are stopped, because they would wait for it. After a later failure they continue.
    """
    codes: dict[int, int] = {}

    def goes_on() -> bool:
        # Nodes that fail for the same reason do not end at the same instant, so a failure ends this one look after it was seen.
        failed = any(codes.values()) and failed_to_begin(children, generation)
        for rank in children.keys() - codes.keys():
            child, code = children[rank], children[rank].poll()
            if code is not None:
                codes[rank] = _exit_code(code, child.log_file)
            if code:
                what = "ssh could not connect" if code == NO_CONNECTION else f"ended with exit code {code}"
                say(f"node {rank} on {hosts[rank]}: {what}: {' '.join(last_lines(child.log_file, 1))}")
        return len(codes) < len(children) and not failed

    show(lambda: [Log("[node 0]", children[0].log_file)], sys.maxsize, follows=goes_on)
    return codes


def _exit_code(code: int, log: Path) -> int:
    """The node's exit code. If ssh lost the connection it is that of a lost node, and if there never was one, that of a wrong host."""
    if code != NO_CONNECTION:
        return code
    established = CONNECTED in log.read_text(encoding="utf-8", errors="replace").splitlines()
    return TooFewNodes.exit_code if established else UsageError.exit_code
