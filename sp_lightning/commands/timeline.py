"""``python -m sp_lightning timeline TRACE.json --plot FILE.png``: a recorded or simulated timeline as a picture."""

import argparse

from . import check_picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("trace", metavar="TRACE.json", help="a timeline that a run or a plan wrote")
    parser.add_argument("--plot", metavar="FILE.png", help="the picture to make (needs the extra 'plots')")
    parser.add_argument("--predicted", metavar="OTHER.json", help="another timeline, drawn above it on the same axis")
    parser.add_argument("--step", type=int, metavar="N", help="the N-th step of the trace, from 0; else a typical one")


def main(args: argparse.Namespace) -> int:
    """Prints where the step's time goes, and draws it if asked to."""
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
