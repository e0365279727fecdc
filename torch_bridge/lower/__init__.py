"""The operator table: importing this package fills it, one module per operator family."""

from . import activation as activation
from . import arithmetic as arithmetic
from . import attention as attention
from . import composite as composite
from . import conv as conv
from . import experts as experts
from . import factory as factory
from . import index as index
from . import linalg as linalg
from . import linear as linear
from . import loss as loss
from . import norm as norm
from . import order as order
from . import pool as pool
from . import random as random
from . import recurrent as recurrent
from . import reduce as reduce
from . import resize as resize
from . import scatter as scatter
from . import shape as shape
from . import special as special
from . import spectral as spectral
from . import symbolic as symbolic
from .registry import find_lowering as find_lowering
from .registry import register_operator as register_operator
from .registry import registered_operators as registered_operators
