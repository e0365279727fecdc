"""Read a compiled XLA module: what it communicates, what hides it, what it multiplies."""

from fzero.preflight.hlo.module import (
    Collective as Collective,
)
from fzero.preflight.hlo.module import (
    Flops as Flops,
)
from fzero.preflight.hlo.module import (
    HloError as HloError,
)
from fzero.preflight.hlo.module import (
    Matmuls as Matmuls,
)
from fzero.preflight.hlo.module import (
    Module as Module,
)
from fzero.preflight.hlo.module import (
    Overlap as Overlap,
)
from fzero.preflight.hlo.module import (
    Total as Total,
)
from fzero.preflight.hlo.module import (
    Window as Window,
)
from fzero.preflight.hlo.module import (
    collectives as collectives,
)
from fzero.preflight.hlo.module import (
    matmul_flops as matmul_flops,
)
from fzero.preflight.hlo.module import (
    overlaps as overlaps,
)
from fzero.preflight.hlo.module import (
    total as total,
)
from fzero.preflight.hlo.module import (
    windows as windows,
)
