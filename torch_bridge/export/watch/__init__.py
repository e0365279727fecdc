"""What torch.export would lose without a word, found while a forward runs or in its code.

- `forward` is run twice and compared, and with other `draws`; `counts`: what it can count in, of
  Python's. `leftovers`: what it keeps there of a trace.
- Tensors that would be `constants` (and the `copies` that stand in for arrays), `hooks`, custom
  `functions`, `modes` of submodules.
- `users_code`: what a user's own code keeps (`function_caches`, `attribute_caches`) and the
  `questions` it asks.
"""
