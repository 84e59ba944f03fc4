"""What a node of a run does: its daemon, the work of each row, and recovery."""
