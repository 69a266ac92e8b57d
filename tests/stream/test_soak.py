"""Many steps with everything that a run can have at once: memory, descriptors and threads stay as they were."""

import processes
import pytest
import soak

LIMIT = 2400  # seconds; on two cores of their own both soaks take less than half of it
STEPS = {"disk": 20_000, "ranks": 5_000}  # a step of ranks takes several times as long


@pytest.mark.slow
@pytest.mark.simgpu
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("name", soak.SETTINGS)  # the slower: parallel workers get a long soak each
def test_a_process_grows_where_it_leaks_and_in_nothing_else(name, leaks):
    steps, begin, every = (1200, 200, 200) if leaks else (STEPS[name], 1000, 500)
    ranks = processes.Processes(soak.SETTINGS[name]["devices"], "spawn")  # memory that others have is not counted
    try:
        of_ranks = ranks.run(soak.run, name, steps, begin, every, leaks, timeout=LIMIT)
    finally:
        ranks.close()
    for rank in of_ranks:
        found = [soak.Sample(*one) for one in rank]
        assert len(found) == (steps - begin) // every + 1
        assert soak.grown(found).keys() == ({"memory", "descriptors"} if leaks else set()), found
