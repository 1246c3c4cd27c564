"""Messages <-> tokens through a chat template, without re-tokenising the model's replies. No
episodes, no models."""
