"""Environments served over HTTP, for rollouts on other machines."""
