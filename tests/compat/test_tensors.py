"""Private names around tensors."""

import sys

import pytest

import sp_lightning.compat.tensors  # noqa: F401


@pytest.mark.parametrize("parts", [("_ctx_", "stream"), ("_ctx_", "device_index"), ("is_inplace", "_on_view")])
def test_what_torch_interns_again_and_again_stays_interned(parts):
    found = "".join(parts)  # not a literal, which this module would keep
    assert sys.intern(found) is not found
