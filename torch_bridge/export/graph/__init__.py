"""An exported graph put right: each rewrites it, or reads from it what torch.export leaves open.

- Rewritten: `in_place` writes, `no_grad` regions, what is written to `detached` tensors, `slices`,
  another `default_dtype`, `mixtures` of experts as one op each, `places` that a tensor says.
- Read: what writes into which `memory`, and which `sides` of it have a gradient; which whole
  numbers fit JAX's (`ranges`, by `range_rules`), where `float64` is needed, which quotients are
  made whole numbers of (`steps`), and which `products` are rounded before they are added to
  something.
"""
