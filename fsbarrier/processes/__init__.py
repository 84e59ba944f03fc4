"""Starts programs, monitors them and kills their process trees, so that none outlives its daemon.

Also the messages between daemons and programs, and this machine's addresses and memory."""
