"""fsbarrier: synchronous multi-node RL post-training over a shared directory, one command per node.

`fsbarrier.join` makes barriers and collectives available to your own scripts (see fsbarrier/group/group.py).
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsbarrier.errors import BarrierTimeout as BarrierTimeout
    from fsbarrier.errors import Fenced as Fenced
    from fsbarrier.errors import OutOfStep as OutOfStep
    from fsbarrier.errors import PeerLost as PeerLost
    from fsbarrier.errors import StoreError as StoreError
    from fsbarrier.group import Group as Group
    from fsbarrier.group import join as join

__version__ = "0.1.0"
__all__ = [
    "BarrierTimeout",
    "Fenced",
    "Group",
    "OutOfStep",
    "PeerLost",
    "StoreError",
    "__version__",
    "join",
]

_HOMES = {
    name: "group" if name in ("Group", "join") else "errors" for name in __all__ if name != "__version__"
}


# The daemon that started this program may ask it for its stacks.
if "FSBARRIER_STACKS" in os.environ:
    from fsbarrier.processes.signals import register

    register()


def __getattr__(name: str) -> Any:
    """Load public names on first use, to keep `import fsbarrier` fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fsbarrier' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fsbarrier.{_HOMES[name]}"), name)
