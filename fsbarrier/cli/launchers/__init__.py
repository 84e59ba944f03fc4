"""Starts all nodes of a run: on this machine, through ssh, or with a job file for a scheduler."""
