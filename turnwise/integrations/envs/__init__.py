"""Environments of other libraries, by name: gymnasium, TextArena, reasoning-gym, GEM, OpenEnv.
The core never imports it."""
