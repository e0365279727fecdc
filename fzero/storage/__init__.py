"""Tiers: on the device, in pinned host memory, in a file without a name.

- `tiers`: where a leaf lives; `disk`: arrays on disk and back.
- `handle`: what stands for an array that is elsewhere.
- `scratch`: space in the file; `requests` reads and writes it, several at once.
"""
