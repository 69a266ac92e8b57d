"""Numbers that an argument of a recipe can be: others are refused in one line, before anything is made.

They stay plain numbers. Those of `jsonargparse.typing` are classes of their own, which a checkpoint would hold, and
which ``torch.load(..., weights_only=True)`` does not read.
"""

from __future__ import annotations

from typing import Any

from jsonargparse.typing import register_type


class PositiveInt(int):
    """int > 0"""


class NonNegativeInt(int):
    """int >= 0"""


class NonNegativeFloat(float):
    """float >= 0"""


def _accept(kind: Any, number: type[int] | type[float], least: int) -> None:
    def read(text: Any) -> Any:
        try:
            if number(text) >= least and number(text) == float(text):
                return number(text)
        except (TypeError, ValueError):
            pass
        raise ValueError(kind.__doc__)

    def is_one(value: Any, _: Any) -> bool:
        return type(value) in (int, number) and value >= least

    register_type(kind, serializer=number, deserializer=read, type_check=is_one)


_accept(PositiveInt, int, 1)
_accept(NonNegativeInt, int, 0)
_accept(NonNegativeFloat, float, 0)
