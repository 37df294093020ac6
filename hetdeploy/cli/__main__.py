"""``python -m hetdeploy.cli``: the command line of this very interpreter."""

from hetdeploy.cli import main

main()
