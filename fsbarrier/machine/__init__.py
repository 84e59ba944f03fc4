"""This machine: its host, its addresses and network interfaces, its accelerators, the filesystems that it mounts."""
