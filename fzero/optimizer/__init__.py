"""What a step does with an optax transformation: what it gives it, and what it asks of it.

- `optimizer`: a transformation with what it is told; `layers`: stacks, as it is told of them.
- `stacks`: whether it sees layers as written out: `operations`, `follow`, `terms` and `zeros` say
  what its values are; `adds_up`: whether it adds up elements.
- `per_layer` (by `roll`), `lookahead`, `small_moments`: wrappers for users.
"""
