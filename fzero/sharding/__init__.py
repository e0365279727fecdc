"""How each leaf lies: its split, its home, its buckets; the way from any layout to any other.

- `split`: along which dim a parameter is cut, and why; which ones train (`frozen_names`);
  `split_state`: the optimizer's state after it; `axes`: what lies along `expert`, `context` and
  `tensor`; `group`: the devices that share out; `patterns`: whether what a plan says by path is
  about any of them.
- `stages`: where a chain is cut for a pipeline; `homes`: which ranks hold which leaf.
- `buckets`: what a plan parks; `park`: to its tier and back. `blueprint`: all of this for one
  model; `buffers`: theirs.
- `relayout`: a leaf from how it is kept to how it shall be kept; `lazy_array`: values read by
  slices.
- `initial`: a model's initial values, traced. `local_batch`: a batch of each process's rows.
- `device_memory`: how much of it a device has.
"""
