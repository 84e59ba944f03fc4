"""Starts programs, monitors them and kills their process trees, so that none outlives its daemon; the daemon-worker files; this machine's addresses."""
