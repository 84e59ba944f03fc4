"""Jobs on a pool of nodes that share a directory: submitted, queued, run, stopped, through that directory alone."""
