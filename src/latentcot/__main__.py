"""`python -m latentcot` is the command line."""

from latentcot.cli import main

main()
