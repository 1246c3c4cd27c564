"""Translates our config to verl's: settings, refusals, requirements. Starts nothing."""
