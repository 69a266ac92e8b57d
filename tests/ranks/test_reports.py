"""Several ranks make one report, in which each has its figures."""

import processes
import pytest
import ranked_reports


@pytest.mark.parametrize(("bar", "timeline"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.seldom
def test_the_first_rank_reports_for_all(bar, timeline, tmp_path):
    (first, files), (second, _) = processes.run(2, ranked_reports.reports, str(tmp_path), bar, timeline)
    assert second == []
    of_ranks = [line for line in first if "by rank: rank 0 " in line]
    assert len(of_ranks) == bar
    assert all("; rank 1 " in line and line.count("host peak") == 2 for line in of_ranks)
    assert files == (["rank1/trace.json", "trace.json"] if timeline else [])
