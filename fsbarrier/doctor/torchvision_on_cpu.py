"""Lets torchvision be imported beside a CPU build of torch: `python -m fsbarrier.doctor.torchvision_on_cpu` changes its environment.

vLLM needs torchvision to serve models that take images, and ordinary package indexes have only its CUDA builds. With a CPU build of torch
the library of such a build does not load, so two operators are missing that torchvision expects it to have registered. Importing
torchvision then fails, and so does transformers, which imports it. All else that is used here works. So a `.pth` file imports this module
in every process of the environment, and it declares the two operators when torchvision is about to be imported. scripts/setup_packages.py
puts both files into each CPU environment. A user of pip is told to run this module (doctor/machine.py).
"""

from __future__ import annotations

import sys

# Each interpreter of the environment runs this when it starts, so it imports nothing else, not even `typing`.
TYPE_CHECKING = False
#: the name of the copy in the environment, which alone changes how imports work
MODULE = "torchvision_on_cpu"
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType
    from typing import Any


class Declares:
    """A finder that finds nothing: it only sees that torchvision is asked for."""

    library: Any = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        # What is declared lasts as long as this object.
        Declares.library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def put_into(packages: Path) -> None:
    """Put this module and its `.pth` file into an environment's folder of packages."""
    import shutil

    shutil.copyfile(__file__, packages / f"{MODULE}.py")
    (packages / "torchvision-on-cpu.pth").write_text(f"import {MODULE}\n")


if __name__ == "__main__":
    import sysconfig
    from pathlib import Path

    put_into(Path(sysconfig.get_path("purelib")))
elif __name__ == MODULE:
    sys.meta_path.insert(0, Declares())
