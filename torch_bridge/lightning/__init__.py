"""Lightning modules as models and optax transformations."""

from torch_bridge.lightning.module import Lightning as Lightning
from torch_bridge.lightning.module import from_lightning as from_lightning
