"""The policy behind an OpenAI-compatible API: programs that call a model become episodes. No tokens
are made or scored here."""
