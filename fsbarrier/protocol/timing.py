"""How long a node may be silent, and how long nodes wait for each other, where nobody says otherwise. In seconds."""

BEAT_S = 2.0  # between two heartbeats of a node
SUSPECT_S = 6.0  # of silence until a node is suspected
DEAD_S = 15.0  # of silence until a node counts as lost
STAGGER_S = 2 * BEAT_S  # by which each further survivor lets the ones before it go first
JOIN_TIMEOUT_S = 1800.0
REJOIN_TIMEOUT_S = 1800.0
