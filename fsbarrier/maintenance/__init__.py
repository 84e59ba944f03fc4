"""What is done around a run: checking a filesystem, measuring it, recovering after a disaster."""
