"""Documents that share a row, each beginning at position 0 again, by which models tell them apart; and padding in front
of one, which a mask tells. Not all models heed these."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .errors import BadInput

LENGTH = 8  # of the documents that are tried
INSTEAD = "set data.packing=false"


def check_apart(model: Any, device: torch.device) -> None:
    """Refuses a model in which a document sees the one before it in its row. It is tried, not looked up: many that take
    positions only place tokens by them, or have a state or a convolution that runs on. Costs one pass of few tokens."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # under adapters
    name = type(base).__name__
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise BadInput(f"{name} takes no position_ids, so packed documents would see each other: {INSTEAD}")
    one, other = after_two_documents(model, base.config.get_text_config().vocab_size, device)
    differs, largest = float((one - other).abs().max()), float(one.abs().max())
    if differs > largest * torch.finfo(one.dtype).eps ** 0.5:  # far more than rounding
        raise BadInput(
            f"in {name} packed documents see each other: with another one before it, a document's logits differ by "
            f"{differs:.2g} (the largest is {largest:.2g}); {INSTEAD}"
        )


@torch.no_grad()
def check_padding(model: Any, device: torch.device) -> None:
    """Refuses a model to which the mask of a row's padding makes no difference, as to some with a state in place of
    attention: an answer would depend on the longer prompts beside it. It is tried: costs two passes of few tokens."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # under adapters
    tokens = torch.arange(2 * LENGTH, device=device).remainder(base.config.get_text_config().vocab_size).unsqueeze(0)
    masks = torch.ones_like(tokens), (torch.arange(2 * LENGTH, device=device) >= LENGTH).long().unsqueeze(0)
    one, other = (model(input_ids=tokens, attention_mask=mask, use_cache=False).logits for mask in masks)
    if torch.equal(one[:, LENGTH:], other[:, LENGTH:]):
        raise BadInput(
            f"{type(base).__name__} does not heed attention_mask, so a prompt's answer would depend on the longer ones "
            "in its batch: set data.batch_size=1, or give it prompts of one length"
        )


@torch.no_grad()
def after_two_documents(model: Any, vocabulary: int, device: torch.device) -> torch.Tensor:
    """The logits of one document, behind each of two others."""
    first, other, document = (vocabulary // 2 + torch.arange(3 * LENGTH)).remainder(vocabulary).view(3, LENGTH)
    tokens = torch.stack([torch.cat([before, document]) for before in (first, other)]).to(device)
    positions = torch.arange(LENGTH, device=device).repeat(2, 2)
    training = model.training
    try:
        logits = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits
    finally:
        model.train(training)
    return logits[:, LENGTH:]
