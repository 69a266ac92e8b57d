"""A module and its optimizer go from streaming to streaming, with a plain run's bits after each (handovers.py)."""

from __future__ import annotations

import handovers
import pytest
import torch

COUNT = 200


def known(moves):
    """The moves of a history in which nothing differs."""
    return [move for move in moves if move.partition(" {")[0] in handovers.MOVES]


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(10, COUNT, 10))])
def test_a_history_of_streamings_has_the_bits_of_a_plain_one(first, device, tmp_path):
    for number in range(first, first + 10):
        moves = handovers.play(number, device, str(tmp_path))
        assert moves == known(moves), f"{number}: {moves[-1]} differs after {moves[:-1]}"


@pytest.mark.parametrize("number", [4, 11])
def test_a_bit_that_differs_is_noticed(number, device, tmp_path):
    def spoil(side):
        with torch.no_grad():
            next(side.net.parameters()).view(-1)[0].nextafter_(torch.tensor(9.0))

    moves = handovers.play(number, device, str(tmp_path), spoil)
    assert moves[-1].startswith("weight of ")


def test_histories_have_all_moves():
    played = {
        move.partition(" {")[0] for number in range(8) for move in handovers.play(number, torch.device("cpu"), ".")
    }
    assert len(played) > len(set(handovers.MOVES)) - 3
