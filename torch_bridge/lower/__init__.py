"""The operator table: importing this package fills it, one module per operator family.

- `registry`: the table; `refs`: names of values in arguments; `sizes` and what guards them.
- Numbers: `activation`, `arithmetic`, `special_functions`, `bessel`, `spectral`, `linalg`,
  `matrix_norms`, `pseudo_inverse`, `linear`, `reduce`, `distances`, `norm`, `loss`,
  `composite`.
- Positions: `shape`, `factory`, `index`, `flat_index`, `scatter`, `segments`, `order`.
- Images: `conv`, `pool`, `resize`, `grid`, `detection`.
- Layers: `attention` (with `masks`, `kernels`, `query_blocks`), `recurrent`, `experts`, `random`,
  `weight_records`, `control`.
- What all share: `rounding` and `wide_operators` (dtypes as PyTorch computes them), `tangents` and
  `no_gradient` (its derivatives), `features_last` (how images are held), `whole_dims` (what XLA's
  partitioner gets wrong).
"""

from torch_bridge.lower import activation as activation
from torch_bridge.lower import arithmetic as arithmetic
from torch_bridge.lower import attention as attention
from torch_bridge.lower import bessel as bessel
from torch_bridge.lower import composite as composite
from torch_bridge.lower import control as control
from torch_bridge.lower import conv as conv
from torch_bridge.lower import detection as detection
from torch_bridge.lower import distances as distances
from torch_bridge.lower import experts as experts
from torch_bridge.lower import factory as factory
from torch_bridge.lower import flat_index as flat_index
from torch_bridge.lower import grid as grid
from torch_bridge.lower import index as index
from torch_bridge.lower import linalg as linalg
from torch_bridge.lower import linear as linear
from torch_bridge.lower import loss as loss
from torch_bridge.lower import matrix_norms as matrix_norms
from torch_bridge.lower import norm as norm
from torch_bridge.lower import order as order
from torch_bridge.lower import pool as pool
from torch_bridge.lower import pseudo_inverse as pseudo_inverse
from torch_bridge.lower import random as random
from torch_bridge.lower import recurrent as recurrent
from torch_bridge.lower import reduce as reduce
from torch_bridge.lower import resize as resize
from torch_bridge.lower import scatter as scatter
from torch_bridge.lower import segments as segments
from torch_bridge.lower import shape as shape
from torch_bridge.lower import sizes as sizes
from torch_bridge.lower import special_functions as special_functions
from torch_bridge.lower import spectral as spectral
from torch_bridge.lower import weight_records as weight_records
from torch_bridge.lower.registry import find_lowering as find_lowering
from torch_bridge.lower.registry import register_operator as register_operator
from torch_bridge.lower.registry import registered_operators as registered_operators
