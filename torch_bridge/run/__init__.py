"""A training run, from checked settings to the written directory; commands are only its flags.

From the lowest to the highest, but for `compose`, which knows all:

- `errors`: what ends a run without a traceback; `figures`: what is shown of it, and kept.
- What it is asked, as frozen data: `settings`, `tuning_settings` (documents and adapters);
  `plan_file` reads a run's file.
- `devices`, `models`: what it runs on, and the module behind `--model`.
- `compose` puts it together; `loop` is the training loop, `interrupt` ends it, `resume` goes on
  with it, `hosts` divides it between processes.
- What is trained, and on what: `tasks`, and `tuning_task` of documents (`packing_check`: whether
  packed rows are apart); `corpus` is what a loop asks of a text, `data` the text.
- What it leaves: `outputs`, `about`, `plot`; `check` and `verify` compare it with PyTorch.
"""
