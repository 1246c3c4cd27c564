"""Our parts in verl's processes: the hf engine, the CPU platform, the patches. No
credit, no episodes."""
