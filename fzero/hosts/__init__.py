"""Several processes: how they find each other, compare what they run, and end together.

- `join` (`fz.join`) makes this process one of a `world`; `channel` carries lines between them.
- `agree` compares what all must have in common; `watch` ends all when one is lost, and says what it
  was at (`activity`).
"""
