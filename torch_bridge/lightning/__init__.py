"""Lightning modules as models and optax transformations.

- `module` (`tb.from_lightning`) makes the model of `steps`; `predict` beside it.
- `configure` reads `configure_optimizers`; `hooks`: what would be left out is refused.
"""

from torch_bridge.lightning.module import Lightning as Lightning
from torch_bridge.lightning.module import from_lightning as from_lightning
