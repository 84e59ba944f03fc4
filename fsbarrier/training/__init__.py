"""Training: batches, advantages, losses, optimizer steps, checkpoints.

Libraries for the programs of phases 8 and 10 (fsbarrier/workers/prepare.py, update.py). They import torch.
"""
