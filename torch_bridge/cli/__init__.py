"""Commands about PyTorch models: train, eval, finetune, merge, generate, convert, preflight, ...

A command is a module of its name: `train`, `evaluate`, `finetune`, `merge`, `generate`, `convert`,
`inspect`, `import_config`, `bridge`, `preflight`. `flags` is what they are asked; what a training
run does with it is `torch_bridge.run`.
"""
