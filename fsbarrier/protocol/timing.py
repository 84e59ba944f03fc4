"""How long a node may be silent, and how long nodes wait for each other, unless the settings say otherwise. In seconds."""

# Between two heartbeats of a node.
BEAT_S = 2.0
# After so much silence the journal calls a node suspected.
SUSPECT_S = 6.0
# After so much silence a node counts as lost.
DEAD_S = 15.0
# Before a node proposes a generation, it waits so long for each living node of a lower rank, which may do so first.
STAGGER_S = 2 * BEAT_S
JOIN_TIMEOUT_S = 1800.0
REJOIN_TIMEOUT_S = 1800.0
# For so long a node holds out while its filesystem fails, since by their own defaults servers come back by then: GlusterFS fails a
# client for 42 s when a server is restarted, and an NFS server grants its clients 90 s after its start.
OUTAGE_S = 120.0
