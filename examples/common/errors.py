"""What a recipe says when what it was given can not be used."""

from sp_lightning.errors import SuperpipelineError


class BadInput(SuperpipelineError, ValueError):
    """A file, a record or an argument that no training can start from; the message names it."""
