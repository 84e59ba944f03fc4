"""Defaults of the protocol's timeouts, in seconds."""

#: the time between two heartbeats of a node
BEAT_S = 2.0
#: silence after which the journal calls a node suspected
SUSPECT_S = 6.0
#: silence after which a node counts as lost. The longest silence of a living node that was seen on NFS and sshfs is 4.4 s.
DEAD_S = 10.0
#: how long a node waits, for each living node of a lower rank, before it proposes a generation itself
STAGGER_S = 2 * BEAT_S
#: how long a start waits for missing nodes
JOIN_TIMEOUT_S = 1800.0
#: how long the others wait for a lost node without which they may not go on
REJOIN_TIMEOUT_S = 1800.0
#: how long a node retries while its filesystem fails; a run derives it from `dead_s` (CoordinationSettings.outage_s)
OUTAGE_S = 120.0
