"""The page of `fsbarrier view`. Only that command imports this room, because NiceGUI takes a second to load."""
