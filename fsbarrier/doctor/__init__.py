"""Asks the mount instead of assuming: can a directory carry a run, what does it promise, and how late does it show things?

`examine` is the whole visit. From one node: `mount_options` says what is known of the mount, `probes` tries it. Between nodes:
`roll_call` and `meeting` bring the doctors together, `races`, `readers`, `delays` and `connections` each measure one thing and judge what
came of it; `verdict` draws the conclusions.
"""
