"""A test of speeds fails where it fails each time."""

import pytest
from speeds import TRIES, measured_again


@pytest.mark.slow
@pytest.mark.parametrize("failures", [0, TRIES - 1, TRIES])
def test_a_test_fails_where_each_of_its_tries_does(failures):
    tries = []

    @measured_again
    def test(given):
        tries.append(given)
        assert len(tries) > failures

    if failures == TRIES:
        with pytest.raises(AssertionError):
            test(given=1)
    else:
        test(given=1)
    assert tries == [1] * min(failures + 1, TRIES)
