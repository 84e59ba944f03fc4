"""This host: who it is, its addresses and network interfaces, its accelerators, the filesystems that it mounts."""
