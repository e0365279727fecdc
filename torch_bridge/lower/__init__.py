"""The operator table: importing this package fills it, one module per operator family."""

from torch_bridge.lower import activation as activation
from torch_bridge.lower import arithmetic as arithmetic
from torch_bridge.lower import attention as attention
from torch_bridge.lower import composite as composite
from torch_bridge.lower import conv as conv
from torch_bridge.lower import experts as experts
from torch_bridge.lower import factory as factory
from torch_bridge.lower import index as index
from torch_bridge.lower import linalg as linalg
from torch_bridge.lower import linear as linear
from torch_bridge.lower import loss as loss
from torch_bridge.lower import norm as norm
from torch_bridge.lower import order as order
from torch_bridge.lower import pool as pool
from torch_bridge.lower import random as random
from torch_bridge.lower import recurrent as recurrent
from torch_bridge.lower import reduce as reduce
from torch_bridge.lower import resize as resize
from torch_bridge.lower import scatter as scatter
from torch_bridge.lower import shape as shape
from torch_bridge.lower import special as special
from torch_bridge.lower import spectral as spectral
from torch_bridge.lower import symbolic as symbolic
from torch_bridge.lower.registry import find_lowering as find_lowering
from torch_bridge.lower.registry import register_operator as register_operator
from torch_bridge.lower.registry import registered_operators as registered_operators
