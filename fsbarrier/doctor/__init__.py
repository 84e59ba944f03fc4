"""Asks the mount instead of assuming: can a directory carry a run, what does it promise, and how late does it show things?

`mount_options` says what is known of the mount, `probes` tries it from one node, `meeting` brings the doctors of several nodes
together, `across` tries it between them, `verdict` draws the conclusions, and `examine` is the whole visit.
"""
