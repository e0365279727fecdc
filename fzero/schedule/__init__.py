"""Pipeline schedules as data: built, checked, simulated, drawn; public in `fzero.pipeline`."""
