"""A training run, from checked settings to the written directory.

- `compose` puts it together; `loop` is the training loop, `interrupt` ends it, `resume` goes on
  with it, `hosts` divides it between processes.
- What is trained, and on what: `tasks`, and `tuning_task` of documents (`packing_check`: whether
  packed rows are apart); `corpus` is what a loop asks of a text, `data` the text.
- What it leaves: `outputs`, `about`, `plot`; `check` and `verify` compare it with PyTorch.
"""
