"""Defaults of the protocol's timeouts, in seconds."""

#: between two heartbeats of a node
BEAT_S = 2.0
#: of silence, before the journal calls a node suspected
SUSPECT_S = 6.0
#: of silence, before a node counts as lost
DEAD_S = 15.0
#: before a node proposes a generation, for each living node of a lower rank, which may propose first
STAGGER_S = 2 * BEAT_S
JOIN_TIMEOUT_S = 1800.0
REJOIN_TIMEOUT_S = 1800.0
#: How long a node retries while its filesystem fails. By default a restarted server is back by then: GlusterFS fails its clients
#: for 42 s, and an NFS server has a grace period of 90 s.
OUTAGE_S = 120.0
