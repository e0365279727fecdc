"""Pipeline schedules as data: built, read, checked, simulated and drawn; `fzero.pipeline` shows them."""
