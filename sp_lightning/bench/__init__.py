"""The same work done by several contenders on the machine at hand, and what each took.

    python -m sp_lightning bench

    setting = bench.Setting.parse(model="llama-3b", precision="bf16-mixed", seq=8192, clip=1.0, repetitions=2)
    rows = [bench.Entry("plain"), bench.Entry("superpipeline", {"window": 4, "transfer": 2}), bench.Entry("fsdp2")]
    result = bench.compare(setting, rows, print)
    bench.report.save_json(result, path)

1. Every contender trains the same model from the same weights on the same batches, in the same precision, with the same
   optimizer, in one run; what it does differently by nature its ``how`` says.
2. Each has a process of its own: memory is the process's, and a crash or a missing library ends one row, not the run.
3. Repetitions are interleaved: all contenders have their first turn, then all their second. Only one works at a time.
   Processes that fit into memory together stay and wait for their turns; otherwise each turn is a fresh process, which
   is alone with the memory. A waiting process has given back what its device allocator only kept cached.
4. A repetition is timed from the begin of one step to the begin of a later one, with the device idle at both ends: what
   a step leaves to the next one, as a host optimizer that is still at work, is paid within. The step before is not
   counted, nor are the first steps of a process.
5. Host memory is the growth of the process's resident set from before the model is made, at its highest; device memory
   is the most that the device's allocator had given out in the process.
6. A parameter counts in the model's operations once for every real token that is multiplied with it: 6 per token in
   training, 2 in inference. A table that is only looked up does not count, nor do recomputation and attention's
   products of activations.
"""

from . import report
from .entries import Entry, entries
from .referee import compare
from .setting import Setting

__all__ = ["Entry", "Setting", "compare", "entries", "report"]
