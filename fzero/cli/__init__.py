"""The subcommands of `fzero`: `calibrate`, `doctor`, `launch`, `report` and `schedule`.

The command itself is the module `fzero_command`; flags of several commands are in `flags`.
"""

from fzero_command import EXIT_USAGE as EXIT_USAGE
from fzero_command import app as app
from fzero_command import command_app as command_app
from fzero_command import commands as commands
from fzero_command import main as main
