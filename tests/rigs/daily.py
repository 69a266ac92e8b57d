"""Choose what the default run has of a product of settings, and of a test with many cases: the rest is slow."""


def axes(item):
    """The ids of its values: one for each time that the test is parametrized."""
    return list(enumerate(item.callspec._idlist)) if hasattr(item, "callspec") else []


def not_needed(alike):
    """Of a test that is parametrized several times: all but few of its items, which have every value of each time.

    The product is slow, as that of a `parity.product` is. Where there is a choice, what has a race checker stays.
    """
    left = sorted(alike, key=lambda item: "simgpu" not in item.callspec._idlist)
    missing = {value for item in alike for value in axes(item)}
    while missing:
        best = max(left, key=lambda item: len(missing.intersection(axes(item))))
        missing.difference_update(axes(best))
        left.remove(best)
    return left


def more_than_few(alike, count):
    """Of a test with the mark ``few(count)``: all items but ``count`` that lie apart, half of them on each device.

    What is the same for all cases is seen in few; each case by itself is seen in the slow run.
    """
    simulated = [item for item in alike if "simgpu" in item.callspec._idlist]
    others = [item for item in alike if item not in simulated]
    half = min(len(simulated), max(count - count // 2, count - len(others)))
    kept = [*_apart(simulated, half), *_apart(others, count - half)]
    return [item for item in alike if item not in kept]


def _apart(items, count):
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
