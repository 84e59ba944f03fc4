"""First on the path of a toy run, which needs no torch: importing it takes longer than such an iteration.

Merges then write the format of the ranks' files.
"""

raise ImportError("this run shall do without torch")
