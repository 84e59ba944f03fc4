"""Every setting of a run: its type, default and meaning; where values come from, and how they become one checked whole."""
