"""`python -m dinfer.cli`: the command line without its script."""

from dinfer.cli import main

main()
