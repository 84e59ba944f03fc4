"""The run directory: names and paths, run.json, records, heartbeats, the journal, checkpoints, clean-up."""
