"""States on disk: written whole or not at all, read into any plan."""
