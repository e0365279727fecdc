"""Configuration files of other trainers, read as a plan, an optimizer and a schedule."""

from torch_bridge.configs.accelerate import from_accelerate as from_accelerate
from torch_bridge.configs.deepspeed import from_deepspeed as from_deepspeed
from torch_bridge.configs.imported import Imported as Imported
from torch_bridge.configs.trainer import from_training_arguments as from_training_arguments
