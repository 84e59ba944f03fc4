"""What a policy is trained on and how: trajectories to batches, advantages, losses, the optimizer step, and what is saved.

Libraries for the programs of phases 8 and 10 (fsbarrier/workers/prepare.py, update.py). torch is loaded here.
"""
