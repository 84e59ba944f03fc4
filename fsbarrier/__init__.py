"""fsbarrier: synchronous multi-node RL post-training over a shared directory, one command per node.

Your own scripts can use what the runs are built on: `fsbarrier.join` (see fsbarrier/group/group.py).
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


# A daemon started this program: it is to tell its stacks when the daemon asks for them.
if "FSBARRIER_STACKS" in os.environ:
    from fsbarrier.stack_signal import register

    register()


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used: `import fsbarrier` itself stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fsbarrier' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fsbarrier.{_HOMES[name]}"), name)
