"""How each leaf lies: its split, its home, its chunks; the way from any layout to any other."""
