"""Commands about PyTorch models: train, eval, finetune, merge, generate, convert, preflight, ...

A command is a module of its name: `train`, `evaluate`, `finetune`, `merge`, `generate`, `convert`,
`inspect`, `import_config`, `bridge`, `preflight`. What they have in common is in folders and
modules of which each imports only from those before it:

- `errors`: what ends a command without a traceback; `figures`: what is shown of a run, and kept.
- `flags`: what commands are asked, and settings made of it.
- `devices`, `models`: what a command runs on, and the module behind `--model`.
- `run`: a training run.
"""
