"""Information about this host: identity, addresses, network interfaces, accelerators, mounts."""
