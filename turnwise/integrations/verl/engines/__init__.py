"""What verl runs that is ours: the hf engine, the platform without accelerators, the few patches."""
