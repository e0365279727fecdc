"""From a graph to a chain: equal blocks, stacks, links, the two halves of a loss.

- `blocks` finds equal blocks by their `forms`; `rolling` decides for both modes, `rolled` is a
  graph with loops, `stacked` names its leaves.
- `chain` makes links of it and of a loss (`loss_halves`, `heads`).
- `retrace`: other sizes and dtypes than the example's. `divide`, `flow`, `flow_rules`: what may
  lie along `tensor` or `expert`.
"""
