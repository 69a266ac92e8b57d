"""Stream the models of Hugging Face's Trainer, of TRL and of loops with accelerate: ``sp_lightning.hf.streaming``.

Importing this package imports nothing of theirs; opening the context imports accelerate.
"""

from .context import enable, streaming

__all__ = ["enable", "streaming"]
