"""Train a language model to say what a frozen, larger one says."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeFloat, PositiveInt
from ..common.errors import BadInput
from ..common.loss import following
from ..common.text import IGNORED, Document, collate, pad
from ..finetune_llm.module import FineTuneLLM

Match = Literal["logits", "hidden", "both"]


class Distill(FineTuneLLM):
    """A language model (the student) beside a frozen one (the teacher), which is in no checkpoint and no export.

    Args:
        teacher: A checkpoint directory or a name on the hub, with the student's tokenizer. None: a tiny one.
        teacher_dtype: Of its weights; "auto" for the checkpoint's own.
        match: What the student learns to have in common with it: what follows each token ("logits"), what its blocks
            return ("hidden"), or "both".
        temperature: By which logits are divided, so that less likely tokens count for more.
        own: The share of the loss that is the student's own, of the tokens in the data.
        on_policy: The share of batches in which the student continues the prompts, and learns from the teacher about
            what it wrote itself.
        max_new_tokens: That the student writes.
        **options: FineTuneLLM's, for the student.
    """

    def __init__(
        self,
        teacher: str | None = None,
        teacher_dtype: str = "auto",
        match: Match = "logits",
        temperature: NonNegativeFloat = 2.0,
        own: float = 0.1,
        on_policy: float = 0.0,
        max_new_tokens: PositiveInt = 32,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.teacher_name = teacher
        self.teacher_dtype = teacher_dtype
        self.match = match
        self.temperature = temperature
        self.own = own
        self.on_policy = on_policy
        self.max_new_tokens = max_new_tokens
        self.teacher: Any = None
        self.projection: nn.Module = nn.Identity()  # from the student's width to the teacher's
        self.strict_loading = False  # a checkpoint holds the student; the teacher is read from its own

    def configure_model(self) -> None:
        for name, value in (("own", self.own), ("on_policy", self.on_policy)):
            if not 0 <= value <= 1:
                raise BadInput(f"model.{name}={value} is a share, from 0 to 1")
        if self.temperature <= 0:
            raise BadInput(f"model.temperature={self.temperature} has to be more than 0")
        if self.on_policy and self.trainer.datamodule.packing:
            raise BadInput("model.on_policy needs data.packing=false: a row of several documents has no one prompt")
        super().configure_model()
        if self.teacher is None:
            self.teacher = self.load_teacher().eval().requires_grad_(False)
            ours, theirs = (model.config.get_text_config() for model in (self.model, self.teacher))
            if self.match != "logits" and ours.hidden_size != theirs.hidden_size:
                with torch.device("cpu"):  # wherever a plain strategy wants what is made
                    self.projection = nn.Linear(ours.hidden_size, theirs.hidden_size, bias=False)

    @property
    def teacher_checkpoint(self) -> str:
        """Where the teacher is read from."""
        return self.teacher_name or str(tiny.made(tiny.place(self.trainer) / "teacher", tiny.teacher))

    def prepare_data(self) -> None:
        super().prepare_data()
        _ = self.teacher_checkpoint

    def load_teacher(self) -> Any:
        """Load the teacher, whose tokens have to be the student's."""
        from transformers import AutoModelForCausalLM

        data, name = self.trainer.datamodule, self.teacher_checkpoint
        longest = data.block_size + (self.max_new_tokens if self.on_policy else 0)
        for checkpoint in (self.checkpoint, name):
            if longest > (most := checkpoints.positions(checkpoints.load_config(checkpoint))):
                raise BadInput(
                    f"rows of {longest} tokens (data.block_size, and model.max_new_tokens if the student writes) are "
                    f"more than the {most} positions of the model of {checkpoint}"
                )
        if checkpoints.load_tokenizer(name, name).get_vocab() != data.tokenizer.get_vocab():
            raise BadInput(
                f"the tokenizer of model.teacher={name} has other tokens than that of {self.checkpoint}, so what "
                "follows a token cannot be compared; take two models of one family"
            )
        return checkpoints.load(AutoModelForCausalLM, name, self.teacher_dtype)

    # ---- what is compared

    def compared(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the student's distance from the teacher on a batch, and its own loss."""
        asked = {name: value for name, value in batch.items() if name != "labels"}
        options = {"use_cache": False, "output_hidden_states": self.match != "logits"}
        with torch.no_grad():
            theirs = (self.teacher.base_model if self.match == "hidden" else self.teacher)(**asked, **options)
        ours = self.model(**batch, **options)
        distance = ours.loss.new_zeros(())
        if self.match != "hidden":
            learned = following(batch["labels"]) != IGNORED
            width = min(ours.logits.shape[-1], theirs.logits.shape[-1])  # either may have rows that no token uses
            logits = (each.logits[..., :width].flatten(0, 1)[learned] for each in (ours, theirs))
            distance = distance + self.divergence(*logits)
        if self.match != "logits":
            read = batch["attention_mask"].bool() if "attention_mask" in batch else batch["labels"] != IGNORED
            distance = distance + self.between_blocks(ours.hidden_states[1:], theirs.hidden_states[1:], read)
        return distance, ours.loss

    def divergence(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return the divergence of the student's next tokens from the teacher's.

        It is scaled so that its gradients are as large at any temperature.
        """
        ours, theirs = (log_softmax(logits.float() / self.temperature, -1) for logits in (ours, theirs))
        return kl_div(ours, theirs, log_target=True, reduction="batchmean") * self.temperature**2

    def between_blocks(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], read: Tensor) -> Tensor:
        """Return the mean distance between the outputs of the student's blocks and the teacher's at the same depth.

        Depth is relative, and a distance is a share of the size of the teacher's output.
        """
        total = torch.zeros((), device=read.device)
        for index, mine in enumerate(ours, start=1):
            other = theirs[round(index * len(theirs) / len(ours)) - 1][read].float()
            apart = self.projection(mine[read]).float() - other
            total = total + apart.square().mean() / other.square().mean()
        return total / len(ours)

    # ---- what the student writes

    @torch.no_grad()
    def written(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Let the student continue the batch's prompts; its own words are what is learned."""
        tokenizer = self.trainer.datamodule.tokenizer
        end = tokenizer.eos_token_id
        filler = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        prompts = []
        for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            first = next(place for place, label in enumerate(labels) if label != IGNORED)
            prompts.append(tokens[: max(1, first)])
        longest = max(map(len, prompts))
        ids = torch.tensor([[filler] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(ids)
        self.model.eval()
        try:
            made = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.max_new_tokens,
                do_sample=True,
                pad_token_id=filler,
                eos_token_id=end,
            )
        finally:
            self.model.train()
        documents = []
        for prompt, words in zip(prompts, made[:, longest:].tolist(), strict=True):
            said = words[: words.index(end) + 1] if end in words else words
            documents.append(Document(prompt + said, [IGNORED] * len(prompt) + said))
        rows = pad(documents, longest + self.max_new_tokens, filler)
        return {name: value.to(ids.device) for name, value in collate(rows).items()}

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.check_documents(batch)
        written = self.on_policy > 0 and float(torch.rand(())) < self.on_policy
        distance, own = self.compared(self.written(batch) if written else batch)
        loss = distance if written else (1 - self.own) * distance + self.own * own
        self.log_dict({"loss": loss, "distance": distance}, prog_bar=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if not name.startswith("teacher.")}
