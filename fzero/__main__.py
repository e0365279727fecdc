"""`python -m fzero`: the `fzero` command of this very Python."""

from fzero.cli import main


main()
