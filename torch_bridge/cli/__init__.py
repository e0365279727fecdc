"""Commands about PyTorch models: train, eval, finetune, merge, generate, convert, preflight, ..."""
