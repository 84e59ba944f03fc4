"""Asks the mount instead of assuming: can a directory carry a run, what does it promise, and how late does it show things?

`mounts` reads what kind of filesystem it is, `probes` tries it from one node, `meeting` brings the doctors of several nodes together
to exchange `messages`, `across` tries it between them, `verdict` draws the conclusions. Importing this is cheap: daemons do.
"""

from fsbarrier.doctor.mounts import claims_unsafe, mount_of

__all__ = ["claims_unsafe", "mount_of"]
