"""What activations="recompute" puts back before forward runs again, and what it leaves alone."""

import functools
import threading
import types

import pytest
from side_by_side import check, training

import models


def block_that_keeps(value):
    """A block that keeps something, made of itself, as an attribute."""

    class Keeping(models.Block):
        def __init__(self):
            super().__init__()
            self.kept = value(self)

        def forward(self, x):
            return x + self.down(self.activate(self.up(self.norm(x))))

        def activate(self, x):
            return x.relu()

    return Keeping


class Unwilling(dict):
    """Fails when it is looked through, as lazy registries may."""

    def values(self):
        raise ValueError("not to be looked through")


KEPT = {
    "an object that leads to a registry": lambda block: types.SimpleNamespace(registry=Unwilling(a=1)),
    "a bound method": lambda block: block.activate,
    "a partial of a bound method": lambda block: {"activate": functools.partial(block.activate)},
}


@pytest.mark.parametrize("kept", KEPT)
def test_recomputation_copies_no_module_that_an_attribute_leads_to(kept, device, monkeypatch):
    make = models.stack_of(block_that_keeps(KEPT[kept]))
    monkeypatch.setattr(models.Block, "__deepcopy__", lambda *_: pytest.fail("a block was copied"), raising=False)
    check(make, training(), device, activations="recompute")


def test_weights_behind_a_bound_method_are_trained_when_it_is_recomputed(device):
    class Calling(models.Block):
        def __init__(self):
            super().__init__()
            self.first = self.up.forward

        def forward(self, x):
            return x + self.down(self.first(self.norm(x)).relu())

    check(models.stack_of(Calling), training(), device, activations="recompute")


def test_recomputation_does_not_look_through_a_python_module_that_an_attribute_names(device, monkeypatch):
    registry = types.ModuleType("registry")
    registry.models = Unwilling(a=1)
    check(models.stack_of(block_that_keeps(lambda block: registry)), training(), device, activations="recompute")


def test_what_can_not_be_copied_keeps_nothing_else_from_being_put_back(device):
    class Counting(models.Block):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
            self.seen = types.SimpleNamespace(count=0)

        def forward(self, x):
            self.seen.count += 1
            return x + self.seen.count * self.down(self.up(self.norm(x)).relu())

    check(models.stack_of(Counting), training(), device, activations="recompute")
