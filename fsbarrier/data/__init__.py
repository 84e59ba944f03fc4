"""Tasks in, rewards, trajectories on disk: rank files that grow by whole groups, and their merging."""
