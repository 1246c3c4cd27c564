"""Test helpers for this project and its users: tiny models, a faulty environment, slow references,
conformance checks."""
