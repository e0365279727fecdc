"""The operator table: importing this package fills it, one module per operator family."""

from . import activation as activation
from . import arithmetic as arithmetic
from . import attention as attention
from . import composite as composite
from . import conv as conv
from . import factory as factory
from . import index as index
from . import linear as linear
from . import loss as loss
from . import norm as norm
from . import pool as pool
from . import random as random
from . import reduce as reduce
from . import shape as shape
from . import symbolic as symbolic
from .registry import find_lowering as find_lowering
from .registry import register_operator as register_operator
from .registry import registered_operators as registered_operators
