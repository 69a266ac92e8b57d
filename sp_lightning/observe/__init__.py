"""Observing a run: timeline, bottleneck, report, progress, and the doctor for the machine."""
