"""``python -m sp_lightning timeline TRACE.json --plot FILE.png``: draw a recorded or simulated timeline."""

import argparse

from . import check_picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("trace", metavar="TRACE.json", help="a timeline that a run or a plan wrote")
    parser.add_argument("--plot", metavar="FILE.png", help="the picture to make (needs the extra 'plots')")
    parser.add_argument("--predicted", metavar="OTHER.json", help="another timeline, drawn above it on the same axis")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the N-th step of the trace, from 0 (default: a typical one)"
    )


def main(args: argparse.Namespace) -> int:
    """Print where the step's time goes, and draw it with ``--plot``."""
    from ..observe import timeline, timeline_plot

    if args.plot is not None:
        check_picture(args.plot)
    read = [timeline.load(path) for path in (args.predicted, args.trace) if path is not None]
    for one in read:
        print(timeline.summary(one, args.step))
    if args.plot is not None:
        timeline_plot.save(read, args.plot, args.step)
        print(f"drawn: {args.plot}")
    return 0
