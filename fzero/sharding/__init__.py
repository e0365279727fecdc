"""How each leaf lies: its split, its home, its chunks; the mesh; the way from any layout to any other."""
