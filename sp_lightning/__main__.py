"""Run the command line: ``python -m sp_lightning``."""

from sp_lightning.cli import main

main()
