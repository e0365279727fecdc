"""`fzero train` and `fzero eval`: a PyTorch language model and text in, a checkpoint out."""
