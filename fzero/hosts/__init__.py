"""Several processes: how they find each other, compare what they run, and end together."""
