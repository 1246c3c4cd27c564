"""Output of a run: run directory, metrics, console, report, trackers, doctor. Takes no training
decisions."""
