"""Stock scripts with TRL. What streams their models is the command: ``python -m sp_lightning launch``."""
