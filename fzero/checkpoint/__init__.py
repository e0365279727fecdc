"""States on disk: written whole or not at all, read into any plan.

- `write` and `restore`; `metadata`: what is known of a checkpoint without its arrays.
- `manager` writes with orbax, `shards` what each process has; `objects`: object stores (`urls`).
- `seal`: whether arrays and metadata were written together.
- `claim`: one run at a time writes into a directory.
"""
