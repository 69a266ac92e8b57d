"""Compare several contenders on the same work on this machine: time and memory of each.

    python -m sp_lightning bench

    setting = bench.Setting.parse(model="llama-3b", precision="bf16-mixed", seq=8192, clip=1.0, repetitions=2)
    rows = [bench.Entry("plain"), bench.Entry("superpipeline", {"window": 4, "transfer": 2}), bench.Entry("fsdp2")]
    result = bench.compare(setting, rows, print)
    bench.report.save_json(result, path)

1. Every contender trains the same model from the same weights on the same batches, in the same precision, with the same
   optimizer, in one run; its ``how`` says what it has to do differently.
2. Each contender has its own process: memory is measured by process, and a crash or a missing library ends one row, not
   the run.
3. Repetitions are interleaved: all contenders have their first turn, then all their second. Only one works at a time.
   Processes that fit into memory together stay and wait for their turns; otherwise each turn has a new process, which
   has the memory to itself. A waiting process has freed what its device allocator had only cached.
4. A repetition is timed from the start of one step to the start of a later one, with the device idle at both ends: work
   that a step leaves to the next, such as an unfinished host optimizer step, is included. The step between two
   repetitions does not count, nor do the first steps of a process.
5. Host memory is the largest growth of the process's resident set since before the model was made; device memory is
   the peak of what the device's allocator handed out in the process. With several devices a contender has a process
   for each: host memory is the growth of their proportional set sizes together, where a shared page counts once.
6. A parameter counts in the model's operations for every real token that is multiplied with it: 6 per token in
   training, 2 in inference. A table that is only looked up does not count, nor do recomputation and attention's
   products of activations.
"""

from . import report
from .entries import Entry, entries
from .referee import compare
from .setting import Setting

__all__ = ["Entry", "Setting", "compare", "entries", "report"]
