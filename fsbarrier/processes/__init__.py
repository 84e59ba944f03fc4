"""Starts programs, monitors them and kills their process trees, so that none outlives its daemon; defines the daemon-worker files."""
