"""How nodes agree: one look at the facts, the loop around the pure protocol, and what it writes."""
