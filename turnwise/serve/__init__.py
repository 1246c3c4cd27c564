"""Environments over HTTP: the server and its client. Contains no environment logic."""
