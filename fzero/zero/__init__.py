"""ZeRO: which dim of which leaf is split, and the collectives that put leaves together again."""
