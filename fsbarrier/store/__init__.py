"""Files on a shared filesystem: exclusive creates, durable writes, what a mount promises, whom a folder belongs to."""
