"""Starting a run's nodes from one place: on this machine, through ssh, or by writing what a scheduler wants."""
