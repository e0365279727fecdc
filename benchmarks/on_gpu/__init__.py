"""The parts of `benchmarks/gpu.py`: `parts` lists them, `child` runs one, the others are them."""
