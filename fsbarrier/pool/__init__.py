"""A job queue for a pool of nodes. All communication goes through a shared directory."""
