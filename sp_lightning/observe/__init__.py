"""What a run tells: timeline, bottleneck, report, doctor."""
