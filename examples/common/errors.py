"""What a recipe says when what it was given can not be used."""


class BadInput(ValueError):
    """A file, a record or an argument that no training can start from; the message names it."""
