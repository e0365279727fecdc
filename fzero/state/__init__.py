"""The training state, and all that makes another state of one.

- `train_state`: what it is; `init`: a new one; `replan`: under another plan; `offload`: between
  device, host and disk (`phases`: several fields at once); `other_optimizer`: with another
  optimizer;
  `logical`: parameters in their shapes.
- `compute_copy`: parameters in 16 bits beside masters; `averages`: as a step moves them;
  `selection`: which of the two an evaluation reads.
- `require`, `fingerprint`: what operations ask of a state; what processes must have in common.
  `comparison`: `check_same`, `check_finite`.
- `row_order`: in which rows a stack's layers are kept. `filling`: zeros that fill leaves up stay
  where they are. `array_facts`: what is known of an array while it lives, such as to what it was
  given away.
"""
