"""One node of a run: the loop around the protocol, the daemon's threads, and what it does in the shared directory."""
