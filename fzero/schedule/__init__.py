"""Pipeline schedules as data: built, checked, simulated, drawn; public in `fzero.pipeline`.

- `actions`: a schedule as a value; `builders` and `zero_bubble` make those that have `names`.
- `order`: what an action needs and gives. `check` proves a schedule, `deadlock` that no send waits
  for ever; `liveness` gives every activation a slot, `instructions` says when it is read.
- `simulate`: how long it takes and what it holds, drawn by `draw` (text) and `plot` (a picture);
  `medians`: what a step that ran took. `grid`: the schedule itself as text, in the words and
  colours of `kinds`; `serialize`: CSV, JSON.
"""
