"""Task files, and trajectory files: writing, scanning, merging and exporting them."""
