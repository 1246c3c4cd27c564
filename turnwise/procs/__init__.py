"""Processes, threads, time limits and event loops. Knows neither environments nor models."""
