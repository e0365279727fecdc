"""PyTorch modules and checkpoints into JAX and back."""

from .calls import wrap as wrap
from .convert import Applied as Applied
from .convert import Converted as Converted
from .convert import convert as convert
from .files import load as load
from .files import save as save
from .formats.content import Checkpoint as Checkpoint
from .formats.read import checkpoint as checkpoint
from .formats.write import write as write
from .functions import register_function as register_function
from .lightning import Lightning as Lightning
from .lightning import from_lightning as from_lightning
from .losses import causal_lm_loss as causal_lm_loss
from .lower import register_operator as register_operator
from .lower import registered_operators as registered_operators
from .moments import Moments as Moments
from .moments import moments_of as moments_of
from .moments import with_moments as with_moments
from .optim import optimizer as optimizer
from .parity import Parity as Parity
from .parity import parity as parity
from .restore import restore as restore
from .sequential import ConvertedSequential as ConvertedSequential
from .sequential import sequential as sequential
from .statedict import load_state_dict as load_state_dict
from .statedict import state_dict as state_dict
from .structure import Output as Output
from .training import batch as batch
from .training import fit as fit
from .training import load_into as load_into


__all__ = [
    "Applied",
    "Checkpoint",
    "Converted",
    "ConvertedSequential",
    "Lightning",
    "Moments",
    "Output",
    "Parity",
    "batch",
    "causal_lm_loss",
    "checkpoint",
    "convert",
    "fit",
    "from_lightning",
    "load",
    "load_into",
    "load_state_dict",
    "moments_of",
    "optimizer",
    "parity",
    "register_function",
    "register_operator",
    "registered_operators",
    "restore",
    "save",
    "sequential",
    "state_dict",
    "with_moments",
    "wrap",
    "write",
]

# `dir(torch_bridge)`: the public names, not the modules that they are from.
__dir__ = __all__.copy
