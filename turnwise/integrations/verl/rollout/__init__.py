"""Our episodes on verl's servers: agent loops, lockstep, rows of verl's data <-> our batches.
No credit."""
