"""The CUDA engine: packed prefills and blocks of decode steps that run without the host.
Knows no environments."""
