"""Private names of storages, and of functions that work on bytes.

Tried with torch 2.11 and 2.15. Functions in C are bound as they are, so that using one costs no call in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# The address of a storage, by which tensors over the same bytes are known as long as one of them lives. Without it a
# saved tensor could not be told to lie in a unit's buffer.
_cdata: Any = torch._C.StorageBase._cdata  # type: ignore[attr-defined]
storage_id: Callable[[torch.UntypedStorage], int] = _cdata.__get__
has_storage: Callable[[Tensor], bool] = torch._C._has_storage  # sparse tensors have none

# Makes each access to a storage's bytes an error with this message. Without it a weight whose step is pending, or a
# locked slab in a forked process, would be read as zeros or crash the process.
forbid_access: Callable[[int, str], None] = torch._C._set_storage_data_ptr_access_error_msg

# Without these a saved tensor would come back with its sign lost, or one without bytes of its own be sent to the host.
negated_view: Callable[[Tensor], Tensor] = torch._neg_view
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor

# Without it packing a unit's gradients would take a call for each.
copy_all: Callable[[list[Tensor], list[Tensor]], Any] = torch._foreach_copy_
