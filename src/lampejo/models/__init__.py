"""Model architectures: one file each, parameters named as in the checkpoint."""
