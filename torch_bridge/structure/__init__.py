"""From a graph to a chain: equal blocks, stacks, links, the call in a loss.

- `blocks` finds stacks of equal blocks and makes `loops` of them, alike in both modes; `children`
  compares the blocks of one graph by their `forms`; `stacked_names` names the leaves.
- `chain` makes links of it and of a loss (`loss_call`, `heads`); `calls` are those of a forward
  in a loss. `unread_parameters`: of outputs that a loss leaves alone.
- `programs`: calls outside of `jax.jit`. `retrace`: other sizes and dtypes than the example's;
  `widened` makes blocks equal in those.
- `divide`, `flow`, `flow_rules`: what may lie along `tensor` or `expert`.
"""
