"""PyTorch modules and checkpoints into JAX and back."""

from torch_bridge.adapters.lora import lora as lora
from torch_bridge.adapters.quantize import quantize as quantize
from torch_bridge.adapters.state import adapter as adapter
from torch_bridge.adapters.state import merge as merge
from torch_bridge.adapters.state import unmerge as unmerge
from torch_bridge.adapters.state import with_adapter as with_adapter
from torch_bridge.configs import Imported as Imported
from torch_bridge.configs import from_accelerate as from_accelerate
from torch_bridge.configs import from_deepspeed as from_deepspeed
from torch_bridge.configs import from_training_arguments as from_training_arguments
from torch_bridge.convert import convert as convert
from torch_bridge.converted import Applied as Applied
from torch_bridge.converted import Converted as Converted
from torch_bridge.documents.batches import grain_batches as grain_batches
from torch_bridge.documents.rows import Rows as Rows
from torch_bridge.documents.tokens import Document as Document
from torch_bridge.documents.tokens import read_documents as read_documents
from torch_bridge.export.stand_ins.checks_of_values import (
    LeftOutCheckWarning as LeftOutCheckWarning,
)
from torch_bridge.export.stand_ins.experts import OwnLossWarning as OwnLossWarning
from torch_bridge.export.watch.forward import PythonStateWarning as PythonStateWarning
from torch_bridge.export.watch.functions import register_function as register_function
from torch_bridge.export.watch.modes import ModeWarning as ModeWarning
from torch_bridge.export.watch.questions import TracedBranchWarning as TracedBranchWarning
from torch_bridge.formats.content import Checkpoint as Checkpoint
from torch_bridge.formats.files import load as load
from torch_bridge.formats.files import save as save
from torch_bridge.formats.read import checkpoint as checkpoint
from torch_bridge.formats.restore import restore as restore
from torch_bridge.formats.stream import stream as stream
from torch_bridge.formats.write import write as write
from torch_bridge.generation.generate import Generated as Generated
from torch_bridge.generation.generate import generate as generate
from torch_bridge.generation.sampling import Sampling as Sampling
from torch_bridge.lightning import Lightning as Lightning
from torch_bridge.lightning import from_lightning as from_lightning
from torch_bridge.loss_module import with_loss as with_loss
from torch_bridge.losses import causal_lm_loss as causal_lm_loss
from torch_bridge.lower import register_operator as register_operator
from torch_bridge.lower import registered_operators as registered_operators
from torch_bridge.module.moments import Moments as Moments
from torch_bridge.module.signature import Output as Output
from torch_bridge.moments import moments_of as moments_of
from torch_bridge.moments import with_moments as with_moments
from torch_bridge.optim import optimizer as optimizer
from torch_bridge.packing import pack as pack
from torch_bridge.packing import packed_mask as packed_mask
from torch_bridge.parity import Parity as Parity
from torch_bridge.parity import parity as parity
from torch_bridge.sequential import ConvertedSequential as ConvertedSequential
from torch_bridge.sequential import sequential as sequential
from torch_bridge.statedict import load_state_dict as load_state_dict
from torch_bridge.statedict import state_dict as state_dict
from torch_bridge.training import batch as batch
from torch_bridge.training import fit as fit
from torch_bridge.training import load_into as load_into
from torch_bridge.wrap import wrap as wrap


__all__ = [
    "Applied",
    "Checkpoint",
    "Converted",
    "ConvertedSequential",
    "Document",
    "Generated",
    "Imported",
    "LeftOutCheckWarning",
    "Lightning",
    "ModeWarning",
    "Moments",
    "Output",
    "OwnLossWarning",
    "Parity",
    "PythonStateWarning",
    "Rows",
    "Sampling",
    "TracedBranchWarning",
    "adapter",
    "batch",
    "causal_lm_loss",
    "checkpoint",
    "convert",
    "fit",
    "from_accelerate",
    "from_deepspeed",
    "from_lightning",
    "from_training_arguments",
    "generate",
    "grain_batches",
    "load",
    "load_into",
    "load_state_dict",
    "lora",
    "merge",
    "moments_of",
    "optimizer",
    "pack",
    "packed_mask",
    "parity",
    "quantize",
    "read_documents",
    "register_function",
    "register_operator",
    "registered_operators",
    "restore",
    "save",
    "sequential",
    "state_dict",
    "stream",
    "unmerge",
    "with_adapter",
    "with_loss",
    "with_moments",
    "wrap",
    "write",
]

# `dir(torch_bridge)`: the public names, not the modules that they are from.
__dir__ = __all__.copy
