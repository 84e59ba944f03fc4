"""The run directory: every name in it, who made the run, records, heartbeats, the journal, checkpoints, clean-up."""
