"""A module as it comes: names, signature, wrappers, tensors, initial values."""
