"""What a step will need and how long it may take, from its compiled program; no GPU needed.

- `public` (`fz.preflight`) asks `prediction`, which compiles a step (`program`; a pipeline's:
  `pipeline`) for a `topology`, adds up memory, of a pipeline for each rank, and reads `hlo`:
  `kernels`, `network`, `gather_memory` (of gathered weights alone);
  `shapes`, `parking` and `stage_traffic` count what the text does not say.
- `rates` (measured by `calibrate`) make seconds of it: `bounds`; `costs` explains them, `sweep`
  compares plans, `measure` runs the step.
- `result` is the prediction, printed by `tables` and `page`.
"""
