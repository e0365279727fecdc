"""Commands about PyTorch models: train, eval, finetune, merge, generate, convert, preflight, ...

- A command is a module of its name, light to import, and what it does another one: `bridge`
  (`bridge_run`), `convert` and `inspect` (`checkpoint_run`), `generate` (`generate_run`), `merge`
  (`merge_run`), `preflight` (`preflight_settings`, `preflight_run`); `train`, `evaluate` and
  `finetune` (`run`); `import_config`, `plot`.
- Flags: `options` of several commands, shown under `headings`; `run_flags` makes `settings` of them
  (`tuning_settings`), `plan_file` reads and writes them.
- A run: `run` puts it together from `tasks` (`tuning_task`: of documents; `corpus`, `data`: of
  text) and `models`, `loop` is the training loop, `resume` goes on with it, `interrupt` ends it;
  `hosts` and `devices`: on what; `packing_check`: whether packed rows are apart.
- What it shows and leaves: `progress`, `gauge`, `timings`, `writers`, `about`, `outputs`; `check`
  and `verify` compare it with PyTorch. `errors`: what ends a command without a traceback.
"""
