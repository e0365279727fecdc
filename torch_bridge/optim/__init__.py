"""torch's optimizers and learning-rate schedules as optax transformations.

- `groups` makes one of an optimizer and its parameter groups, by the `rules` of its class;
  `scaling`: arithmetic that optax does not have.
- `schedules` runs torch's own once, `rates` are what came of it.
- `unused`: what `tb.fit` may be given.
"""

from torch_bridge.optim.groups import optimizer as optimizer
