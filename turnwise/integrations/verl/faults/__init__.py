"""Cluster faults: missing devices and dead workers raise errors instead of hanging. No
training logic."""
