"""`python -m fzero.cli`: the `fzero` command of this very Python."""

from fzero.cli import main


main()
