"""A compiled XLA module: `module` parses its text, `counts` what it sends, hides and multiplies."""

from fzero.preflight.hlo.counts import Collective as Collective
from fzero.preflight.hlo.counts import Flops as Flops
from fzero.preflight.hlo.counts import HloError as HloError
from fzero.preflight.hlo.counts import Matmuls as Matmuls
from fzero.preflight.hlo.counts import Module as Module
from fzero.preflight.hlo.counts import Total as Total
from fzero.preflight.hlo.counts import Window as Window
from fzero.preflight.hlo.counts import collectives as collectives
from fzero.preflight.hlo.counts import matmul_flops as matmul_flops
from fzero.preflight.hlo.counts import total as total
from fzero.preflight.hlo.counts import windows as windows
