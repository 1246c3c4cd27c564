"""Test helpers for this project and its users: tiny models, a faulty environment, slow references,
conformance checks. No other room imports it, except in docstring examples."""
