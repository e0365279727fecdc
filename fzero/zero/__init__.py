"""ZeRO inside a step: gathers, passes over layers, reduce-scatters (splits: `fzero.sharding`).

- `grads`: one step's gradients on one device; calls, for each microbatch,
- `chain`: a microbatch through all links, by `layer` and `stack` (`stack_layer`, `stack_halves`);
  `prefetch` is the loop that fetches one layer ahead.
- `rules`: how weights are fetched and gradients sent under a plan; `weights` keeps what one pass
  has fetched; `replay` gathers where a function reads, `float8_weights` in 8 bits (`quantize`).
- `collectives`: the gather and the reduce-scatter themselves.
- `vjp`: reverse mode that keeps no weight, and of values what `Plan(remat=)` says; `min_cut`: the
  fewest bytes; `keeping`: what is kept where a plan does not say.
- `sequence_parallel`: positions between layers.
- `bits`: all that is about rounding alike. `options`: what the compiler is told.
- `buffers`, `finite_marks`: buffers of several devices become one; where values stop being finite.
"""
