"""Configuration files of other trainers, read as a plan, an optimizer and a schedule.

- One file for each: `accelerate`, `deepspeed` (with `zero` and `optimizers`), `trainer`
  (`TrainingArguments`).
- `keys` reads them key by key; `outcome` is what came of it; `schedules`: learning rates.
"""

from torch_bridge.configs.accelerate import from_accelerate as from_accelerate
from torch_bridge.configs.deepspeed import from_deepspeed as from_deepspeed
from torch_bridge.configs.outcome import Imported as Imported
from torch_bridge.configs.trainer import from_training_arguments as from_training_arguments
