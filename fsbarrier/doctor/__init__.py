"""Tests whether a directory can support a run: its guarantees, and how late changes become visible to other nodes.

`examine` is the entry point. On one node, `machine` checks the mount options and `probes` tests the filesystem. Between nodes,
`between` measures while all write and read at once, and judges what they found.
"""
