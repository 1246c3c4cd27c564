"""Helpers for tests, ours and users': tiny models, a faulty environment, slow references, conformance checks."""
