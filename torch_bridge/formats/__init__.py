"""Checkpoint formats: every reader gives a `Checkpoint` of lazy tensors, every writer takes one."""
