"""The registry of patches: all that the library replaces in torch, for as long as it needs the replacement.

1. The first user of a patch installs it and the last one removes it, in any order and on any thread. So all users of a
   patch pass the same function: what differs between them it finds when it is called.
2. Removing a patch puts back what was there when its first user came, to the very object: users may have patched the
   attribute themselves, after this file was imported. Where they patched over ours meanwhile, theirs stays, with ours
   below it, which is not installed a second time: it would call itself.
3. No other file assigns to attributes of torch. tests/compat/test_patches.py looks at
   all of these after runs of every kind.
4. A new version of torch is tried with that test, and with those that the comments below name. All patches were tried
   with torch 2.11 and 2.15. Without one of them, the sentence above it happens.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import torch
import torch.utils.checkpoint

ABSENT = object()
_lock = threading.RLock()  # reentrant: the garbage collector may close a user within ``install``
ALL: list[Patch] = []


class Patch:
    """An attribute of a class or module of torch that the library replaces at times (Rules 1 and 2)."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder
        self.name = name
        self.users = 0
        self._original: Any = vars(holder).get(name, ABSENT)
        self._replacement: Any = ABSENT
        self._is_covered = False  # by a patch of the user's
        ALL.append(self)

    @property
    def original(self) -> Any:
        """The attribute that our replacement stands in front of, now or once it is installed."""
        found = self._found
        return self._original if self.users or self._is_covered or found is self._replacement else found

    @property
    def _found(self) -> Any:
        return vars(self.holder).get(self.name, ABSENT)

    def install(self, replacement: Any) -> None:
        """Add a user, the first of which puts the replacement in place."""
        with _lock:
            if not self.users:
                self._is_covered = self._is_covered and self._found not in (self._original, self._replacement)
                if not self._is_covered:
                    self._original, self._replacement = self.original, replacement
                    setattr(self.holder, self.name, replacement)
            self.users += 1

    def remove(self) -> None:
        """Take away a user; after the last one, put back what was there."""
        with _lock:
            self.users -= 1
            if self.users:
                return
            if self._found is not self._replacement:
                self._is_covered = self._found is not self._original
            elif self._original is ABSENT:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, self._original)


def _count(function: Any, lists: list[tuple[int, str]], keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and raise the versions of what it wrote where it has not done so itself."""
    given = [args[place] if place < len(args) else kwargs.get(name, ()) for place, name in lists]
    written = [tensor for tensors in given for tensor in tensors if not tensor.is_inference()]
    before = [tensor._version for tensor in written]
    result = function.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
    unseen = [tensor for tensor, version in zip(written, before, strict=True) if tensor._version == version]
    torch.autograd.graph.increment_version(unseen)
    return result


# stream/sharded.py, while DTensors are streamed, or made on the host for that. Random numbers for a shard on the host
# would be the host's, the same for each shard and in each call: torch moves on the generator of the mesh's device.
@functools.cache
def drawing_for_dtensors() -> Patch:
    """Make the patch: its module is slow to import."""
    random = importlib.import_module("torch.distributed.tensor._random")
    return Patch(random.OffsetBasedRNGTracker, "_distribute_region")
