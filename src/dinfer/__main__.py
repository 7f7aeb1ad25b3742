"""`python -m dinfer`: the command line without its script."""

from dinfer.cli import main

main()
