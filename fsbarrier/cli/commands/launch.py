"""Start all nodes of a run from one machine, or write the file with which a scheduler starts them. PLACE is

  local       several nodes on this machine, with one live view
  ssh         other machines, through ssh; Ctrl-C stops them all
  slurm       write a batch file and submit it with sbatch
  kubernetes  write an indexed Job
  skypilot    write a task file
  dstack      write a task file

All accept the flags and settings of `fsbarrier run`. docs/launching.md has an example of each.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fsbarrier.cli.commands import flags
from fsbarrier.cli.launchers import slurm
from fsbarrier.cli.launchers.job import (
    ClusterJob,
    check_below_mount,
    check_name,
    commands_here,
    fill,
    is_foreign,
    sealed,
    split,
)
from fsbarrier.errors import UsageError
from fsbarrier.settings.secrecy import TRACKERS_KEYS
from fsbarrier.settings.sources import setting_of
from fsbarrier.wording import counted

EXAMPLE = """fsbarrier launch local --nodes 3 --program toy --iterations 2
  fsbarrier launch ssh --hosts a,b,c --data-path /data/math --model Qwen2.5-0.5B-Instruct
  fsbarrier launch slurm --nodes 4 --gpus-per-node 8 --time 12:00:00 --sbatch=--partition=gpu --config run.toml"""

CONTAINERS = ("kubernetes", "skypilot", "dstack")
JOBS = ("slurm", *CONTAINERS)
COMMAND = "the fsbarrier command on the nodes (default: this clone's; in containers: fsbarrier)"
VOLUME = "the shared storage: a volume claim, a volume, or for dstack a folder on the instances"
#: The places -> the flags that only they accept. All places accept the flags of `run`.
FLAGS = {
    ("ssh",): {
        "--hosts A,B,...": "the machines, node 0 first",
        "--ssh COMMAND": "ssh command (default: ssh), for example 'ssh -p 2222'",
        "--logs DIR": "folder for the nodes' output (default: ./launch-logs/TIME)",
    },
    ("ssh", *JOBS): {
        "--fsbarrier COMMAND": COMMAND,
        "--env NAME*": "a variable that the nodes need, such as WANDB_API_KEY; its value appears in no file. May be repeated",
    },
    JOBS: {
        "--name NAME": "job name (default: fsbarrier)",
        "--gpus-per-node N": "accelerators to request on each node",
        "--output FILE": "path of the file to write (default: NAME with a suffix, in this folder)",
    },
    ("slurm",): {
        "--time LIMIT": "time limit, for example 12:00:00",
        "--warn N": "stop and requeue this many seconds before the time limit (default: 600)",
        "--sbatch OPTION*": "additional sbatch option, for example --sbatch=--partition=gpu; may be repeated",
    },
    CONTAINERS: {
        "--image IMAGE": "container image with fsbarrier installed (see scripts/Dockerfile)",
        "--volume NAME": VOLUME,
        "--mount PATH": "mount path of the volume on the nodes (default: /shared)",
    },
    ("kubernetes",): {
        "--fs-group N": "the group that the volume is given, for an image that does not run as root"
    },
    ("skypilot",): {"--accelerator NAME": "accelerator type, for example H100"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", nargs="?", default="", metavar="PLACE", help=", ".join(PLACES))
    for places, own in FLAGS.items():
        flags.add(parser.add_argument_group(", ".join(places)), own)
    flags.add_run_flags(parser)


def main(args: argparse.Namespace) -> int:
    if args.place not in PLACES:
        mistake = f"launch {args.place}: not" if args.place and "=" not in args.place else "launch: say"
        raise UsageError(
            f"{mistake} {', '.join(f'`{place}`' for place in PLACES)} (see fsbarrier launch --help)"
        )
    for places, own in FLAGS.items():
        for flag in (words.split()[0] for words in own if args.place not in places):
            if getattr(args, setting_of(flag)) is not None:
                raise UsageError(f"{flag}: only valid with launch {', '.join(places)}")
    return PLACES[args.place](args)


# --- on this machine ----------------------------------------------------------------------------------------------------


def _local(args: argparse.Namespace) -> int:
    from fsbarrier.cli.launchers import local

    return local.run_all(flags.gather(args), {}, args, flags.say)


# --- on other machines --------------------------------------------------------------------------------------------------


def _job(args: argparse.Namespace, nodes: int, log_path: str) -> ClusterJob:
    """The job for the launcher. Validates flags and settings before anything starts. Raises UsageError."""
    from fsbarrier.settings.resolve import resolve

    args.num_nodes, args.log_path = str(nodes), log_path
    settings = resolve(flags.gather(args))
    words = flags.words_for_others(args, f"launch {args.place}")
    run, stop = commands_here(args.fsbarrier or ("fsbarrier" if args.place in CONTAINERS else None))
    return ClusterJob(
        name=check_name(args.name or "fsbarrier", args.place),
        nodes=nodes,
        gpus_per_node=args.gpus_per_node or 0,
        folder=Path.cwd(),
        log_path=log_path,
        run=run,
        stop=stop,
        words=words,
        env=_variables(args, settings.tracker.names),
    )


def _variables(args: argparse.Namespace, trackers: Sequence[str]) -> tuple[str, ...]:
    """The names after --env. Warns if the nodes would lack a tracker's key. Raises UsageError."""
    names = tuple(dict.fromkeys(args.env or ()))
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name.partition('=')[0]}=...: name a variable, without its value")
        if args.place in ("ssh", "slurm") and not args.dry_run and name not in os.environ:
            raise UsageError(f"--env {name}: is not set here; export it first")
    # Slurm hands on the whole environment anyway.
    for tracker in trackers if args.place != "slurm" else ():
        key = next(iter(TRACKERS_KEYS.get(tracker, ())), None)
        if key is not None and key not in names:
            flags.say(
                f"tracker.names={tracker}: if it needs a key, the nodes get it from here with --env {key}"
            )
    return names


def _nodes(args: argparse.Namespace) -> int:
    if args.num_nodes is None:
        raise UsageError(f"launch {args.place}: give --num-nodes N")
    if not args.num_nodes.isdecimal() or not int(args.num_nodes):
        raise UsageError(f"--num-nodes {args.num_nodes}: must be a whole number, 1 or more")
    return int(args.num_nodes)


def _ssh(args: argparse.Namespace) -> int:
    from fsbarrier.cli.launchers import ssh

    hosts = ssh.read_hosts(args.hosts)
    if args.num_nodes is not None and _nodes(args) != len(hosts):
        raise UsageError(
            f"--num-nodes {args.num_nodes} contradicts the {counted(len(hosts), 'host')} listed; drop it"
        )
    job = _job(args, len(hosts), str(flags.find_log_path(args)))
    words = split("--ssh", args.ssh or "ssh")
    if args.dry_run:
        for command in ssh.commands(job, hosts, words):
            print(shlex.join(command))
        return 0
    if shutil.which(words[0]) is None:
        raise UsageError(f"--ssh {words[0]}: no such program on this machine")
    logs = Path(args.logs or f"launch-logs/{datetime.now(UTC):%Y%m%dT%H%M%SZ}").absolute()
    return ssh.run_all(job, hosts, words, logs, flags.say)


def _slurm(args: argparse.Namespace) -> int:
    job = _job(args, _nodes(args), str(flags.find_log_path(args)))
    text = slurm.batch_script(
        job, time_limit=args.time, warn_s=600 if args.warn is None else args.warn, extra=args.sbatch or ()
    )
    path = _written(args, text, f"{job.name}.sbatch")
    if path is not None:
        number = slurm.sbatch(path)
        print(f"submitted {path} as Slurm job {number}, {counted(job.nodes, 'node')}")
        if not any(option.startswith("--output") for option in args.sbatch or ()):
            print(f"output of all nodes: {job.folder / f'{job.name}-{number}.log'}")
        where = shlex.join(["--log-path", job.log_path])
        print(f"progress: fsbarrier status {where}")
        print(f"to end it: fsbarrier stop {where}, or at once: scancel {number}")
    return 0


def _in_containers(args: argparse.Namespace) -> int:
    if args.fs_group is not None and not args.shared_group:
        raise UsageError(
            f"--fs-group {args.fs_group}: lets this group write to the volume; give --shared-group too"
        )
    if args.place == "skypilot" and args.gpus_per_node and not args.accelerator:
        raise UsageError("launch skypilot: --gpus-per-node needs --accelerator NAME, for example H100")
    needed = {
        "--image": (args.image, "a container image with fsbarrier installed"),
        "--volume": (args.volume, "the storage shared by all nodes"),
        "--log-path": (args.log_path, "the run directory on that volume"),
    }
    for flag, (value, what) in needed.items():
        if not value:
            raise UsageError(f"launch {args.place}: give {flag}, {what}")
    args.mount = args.mount or "/shared"
    job = _job(args, _nodes(args), args.log_path)
    check_below_mount(job, args.mount, args.volume)
    text = fill(f"{args.place}.yaml.jinja", job, args=args)
    path = _written(args, text, f"{job.name}.{args.place}.yaml")
    if path is not None:
        print(f"wrote {path}; its first line shows how to start it")
    return 0


def _written(args: argparse.Namespace, text: str, name: str) -> Path | None:
    """Write the file and return its path; in a dry run print it and return None."""
    if args.dry_run:
        print(text, end="")
        return None
    path = Path(args.output or name)
    if foreign := is_foreign(path):
        raise UsageError(f"--output {path}: exists and {foreign}; choose another name, or remove it")
    flags.write_file("--output", path, sealed(text))
    return path


PLACES: dict[str, Callable[[argparse.Namespace], int]] = {
    "local": _local,
    "ssh": _ssh,
    "slurm": _slurm,
    **dict.fromkeys(CONTAINERS, _in_containers),
}
