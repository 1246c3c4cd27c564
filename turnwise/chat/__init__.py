"""Messages <-> tokens through a chat template, without re-tokenising what a model said. No episodes, no models."""
