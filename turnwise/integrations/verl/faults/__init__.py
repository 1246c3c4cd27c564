"""What goes wrong on a cluster: no devices, dead workers. Errors instead of waits."""
