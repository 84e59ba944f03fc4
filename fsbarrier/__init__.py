"""fsbarrier: synchronous multi-node RL post-training over a shared directory, one command per node."""

__version__ = "0.1.0"
