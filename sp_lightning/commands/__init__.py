"""Commands of ``python -m sp_lightning`` beside LightningCLI's: a module each, with what it takes and what it does.

A module has ``add_arguments(parser)``, which imports nothing heavy, and ``main(args)``, which prints and returns an
exit status. It only translates: what it prints is made by a library module that can be called without it.
"""
