"""torch's optimizers and learning-rate schedules as optax transformations."""

from .groups import optimizer as optimizer
