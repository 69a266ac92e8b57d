"""Disks on the core of before handle.py: whatever streams in these tests does so there."""

import cores
import pytest

import sp_lightning
from sp_lightning.runtime import handle as before


@pytest.fixture(autouse=True)
def on_the_core_of_before(monkeypatch):
    monkeypatch.setattr(sp_lightning, "stream", before.stream)
    monkeypatch.setattr(sp_lightning, "SuperpipelineStrategy", cores.Before)
