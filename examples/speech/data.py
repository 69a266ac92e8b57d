"""Recordings and what is said in them."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..common import checkpoints, tiny
from ..common.arguments import NonNegativeInt, PositiveInt
from ..common.errors import BadInput
from ..common.files import read_jsonl
from ..common.loading import Data, TrainLoader
from ..common.text import IGNORED

SAMPLES = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}  # by their width in bytes


def opened(path: str | Path) -> Any:
    """The file, if it is one that can be read."""
    try:
        sound = wave.open(str(path))  # noqa: SIM115 - the caller closes it
    except (wave.Error, EOFError) as error:
        raise BadInput(f"{path} is not a WAV file of plain samples ({error}): ffmpeg -i {path} out.wav") from error
    if sound.getsampwidth() not in SAMPLES:
        bits = 8 * sound.getsampwidth()
        raise BadInput(f"{path} has samples of {bits} bits: ffmpeg -i {path} -c:a pcm_s16le out.wav")
    return sound


def length(path: str | Path) -> tuple[int, float]:
    """The samples per second, and the seconds."""
    with opened(path) as sound:
        return sound.getframerate(), sound.getnframes() / sound.getframerate()


def samples(path: str | Path) -> Any:
    """What is heard, between -1 and 1, as the mean of the channels."""
    with opened(path) as sound:
        dtype, channels = SAMPLES[sound.getsampwidth()], sound.getnchannels()
        found = np.frombuffer(sound.readframes(sound.getnframes()), dtype).astype(np.float32)
    middle = 128.0 if dtype.kind == "u" else 0.0
    scale = 2.0 ** (8 * dtype.itemsize - 1)
    return ((found - middle) / scale).reshape(-1, channels).mean(1)


class SpeechData(Data):
    """Recordings and what is said in them, from a JSONL file: ``{"audio": "a.wav", "text": "..."}``.

    Args:
        path: The training data; recordings (WAV) are looked for from where the file is. None: tones that the recipe
            makes up.
        val_path: The validation data. None: there is no validation.
        language: That of the texts, for a model of several languages: "en", "german", ...
        batch_size: Records in a batch.
        num_workers: Processes that make batches.
    """

    def __init__(
        self,
        path: str | None = None,
        val_path: str | None = None,
        language: str | None = None,
        batch_size: PositiveInt = 4,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.val_path = val_path
        self.language = language
        self.language_options = {} if language is None else {"language": language, "task": "transcribe"}
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        from transformers import WhisperConfig, WhisperFeatureExtractor

        checkpoint = self.trainer.lightning_module.checkpoint
        self.config = checkpoints.read(WhisperConfig, checkpoint)
        if self.config.model_type != "whisper":
            raise BadInput(f"{checkpoint} is a {self.config.model_type}, not a whisper")
        self.tokenizer = checkpoints.load_tokenizer(checkpoint, checkpoint)
        self.features = checkpoints.read(WhisperFeatureExtractor, checkpoint)
        if self.language is not None:
            self.choose_language(self.language)
        filler = self.tokenizer.pad_token_id
        self.filler = self.tokenizer.eos_token_id if filler is None else filler
        val_path = self.val_path if self.path else self.made_up("val", 8)
        self.train_records = self.records(self.path or self.made_up("train", 64))
        self.val_records = self.records(val_path) if val_path else []

    def choose_language(self, language: str) -> None:
        """Have texts begin with the token of their language."""
        try:
            self.tokenizer.set_prefix_tokens(language=language, task="transcribe", predict_timestamps=False)
            _ = self.tokenizer.prefix_tokens
        except (AttributeError, ValueError) as error:
            raise BadInput(f"data.language={language}: {error}") from error

    def made_up(self, name: str, count: int) -> str:
        """Recordings for a run that was given none."""
        folder = tiny.made(tiny.place(self.trainer) / f"tones-{name}", lambda part: tiny.recordings(part, count))
        return str(folder / "recordings.jsonl")

    def records(self, path: str) -> list[tuple[str, list[int]]]:
        """What the file holds, as recordings and tokens, once each was seen to be one that the model can hear."""
        records = []
        for where, record in read_jsonl(path):
            if not all(isinstance(record.get(key), str) for key in ("audio", "text")):
                raise BadInput(
                    f'{where} has the keys {sorted(record)}; a record needs "audio" and "text"; nothing was trained'
                )
            audio = Path(path).parent / record["audio"]
            if not audio.is_file():
                raise BadInput(f"{where}: the recording {audio} does not exist; nothing was trained")
            rate, seconds = length(audio)
            if rate != self.features.sampling_rate or seconds > self.features.chunk_length:
                raise BadInput(
                    f"{where}: {audio} has {rate} Hz and is {seconds:.1f} s long; the model hears "
                    f"{self.features.sampling_rate} Hz and {self.features.chunk_length} s (ffmpeg -i {audio} -ar "
                    f"{self.features.sampling_rate} -t {self.features.chunk_length} out.wav); nothing was trained"
                )
            records.append((str(audio), self.tokens(record["text"], where)))
        return records

    def tokens(self, text: str, where: str) -> list[int]:
        """Those that the model is to write, without the one that it is given to begin with."""
        tokens = [*self.tokenizer(text)["input_ids"]]
        if tokens[:1] == [self.config.decoder_start_token_id]:
            del tokens[0]
        if tokens[-1:] != [self.tokenizer.eos_token_id]:
            tokens.append(self.tokenizer.eos_token_id)
        if len(tokens) > self.config.max_target_positions:
            raise BadInput(
                f"{where}: a text of {len(tokens)} tokens is more than the {self.config.max_target_positions} "
                "positions of the model; nothing was trained"
            )
        return tokens

    def collate(self, records: Sequence[tuple[str, list[int]]]) -> dict[str, Tensor]:
        """A batch."""
        sounds = [samples(path) for path, _ in records]
        rate = self.features.sampling_rate
        heard = self.features(sounds, sampling_rate=rate, return_tensors="pt")["input_features"]
        labels = [torch.tensor(tokens) for _, tokens in records]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        return {"input_features": heard, "labels": padded}

    def train_dataloader(self) -> TrainLoader:
        options = {"collate_fn": self.collate, "num_workers": self.num_workers}
        return self.train_loader(self.train_records, self.batch_size, **options)

    def val_dataloader(self) -> Any:
        if not self.val_records:
            return []
        return DataLoader(self.val_records, self.batch_size, collate_fn=self.collate, num_workers=self.num_workers)
