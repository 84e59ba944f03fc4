"""Tests whether a directory can support a run: its guarantees, and how late changes become visible to other nodes.

`examine` is the entry point. On one node, `mount_options` checks the mount options and `probes` tests the filesystem. Between nodes,
`roll_call` and `meeting` bring the doctors together; `races`, `readers`, `delays` and `connections` each measure one property and judge the
result; `verdict` combines the results.
"""
