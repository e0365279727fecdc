"""A module as it comes: names, signature, wrappers, tensors, initial values.

- `names`: which tensor is which leaf; `adapters`: those of adapters. `signature`: arguments in,
  outputs out.
- `weights`: tensors copied in and out; `moments`: Adam's, by the same names; `lazy_tensor`: tensors
  in files, `misfits`: those that do not fit; `initial`: values read when they are needed.
- `copied`: a copy without weights, to be traced later. `wrappers`: modules in others;
  `quantized_linear`: weights in few bits; `quantisers`: those whose weights are refused.
"""
