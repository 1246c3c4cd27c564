"""Environments over HTTP: the server and its client. What an environment does is none of its business."""
