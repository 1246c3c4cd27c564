"""The page that shows runs: reads run directories, serves and exports what it finds, and lets
people play environments. Nothing here writes into a run directory but its report, and no code that
a run names is ever loaded."""
