"""PyTorch's side: a module traced into a graph, and what export would lose.

- `export` makes one graph of a module in each `mode` (of submodules: `modes`), from an `example`;
  `trace` keeps what torch knew about its values, `origins` where they come from, `shapes` which
  sizes they may have. `interpret` evaluates it by JAX; `slopes`: gradients inside a forward.
- What torch.export cannot trace stands in another form meanwhile (`replacement`): `stand_ins`, and
  those of `packed_sequences`, `synchronized_norms`, `state_spaces`, `causal_masks`, adapters
  (`adapter_stand_ins`) and mixtures of experts (`expert_stand_ins`, `older_experts`; in the
  graph: `mixtures`, `capacity`).
- What it would lose without a word is found: `watch` and `counts` (Python's state), tensors that
  would be `constants`, `hooks`, custom `functions`, what `users_code` keeps (`function_caches`,
  `attribute_caches`) and the `questions` it asks; `remedies` says what to write instead.
- The graph is put right: `in_place` writes, `no_grad` regions and what gradients `reach`, `slices`,
  whole numbers (`ranges`, `range_rules`), `float64`, another `default_dtype`.
"""
