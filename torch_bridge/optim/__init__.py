"""torch's optimizers and learning-rate schedules as optax transformations."""

from torch_bridge.optim.groups import optimizer as optimizer
