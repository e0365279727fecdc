"""Tiers: on the device, in pinned host memory, in a file without a name."""
