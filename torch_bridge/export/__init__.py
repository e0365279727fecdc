"""PyTorch's side: a module traced into a graph, and what export would lose.

- `export` makes one graph of a module in each `mode`, from an `example`; `trace` keeps what torch
  knew about its values, `origins` where they come from, `shapes` which sizes they may have.
- `unread`: what it does for those who debug it is left undone.
- `stand_ins`: what torch.export cannot trace stands in another form meanwhile; `calls`: what is
  done before and after a module's calls.
- `watch`: what it would lose without a word is found; `remedies` says what to write instead.
- `graph`: the graph is put right. `decompose`: which operators do not stay whole.
- `interpret` evaluates it by JAX; so gradients say which parameters they `reach`.
"""
