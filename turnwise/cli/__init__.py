"""The command line. One file per command, each with `register(app)`; heavy imports happen inside
the commands."""
