"""Programs as data: taken apart, divided by where their leaves live, run anew.

- `jaxprs`: a traced program as a list of ops; `halves` divides a backward pass, `sites` a function
  of arrays on different devices.
- `digest`: a program as a number; `flops` counts its products; `partitioner_faults`: what XLA's
  partitioner gets wrong; `trace_memo`: what a trace works out one time; `unchanged`: which outputs
  are inputs, handed on.
- `forward_calls`: the calls of a module that a loss makes, where JAX transforms the loss, too.
"""
