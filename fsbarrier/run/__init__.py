"""What a node of a run does: its daemon, the jobs of each row, clean-up and recovery."""
