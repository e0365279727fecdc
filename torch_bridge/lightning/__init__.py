"""Lightning modules as models and optax transformations."""

from .module import Lightning as Lightning
from .module import from_lightning as from_lightning
