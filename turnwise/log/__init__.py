"""What a run leaves behind and shows: run directory, metrics, console, report, trackers, doctor. Decides nothing."""
