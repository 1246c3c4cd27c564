"""The engine of CUDA: packed prefills and blocks of decode steps that stay on the device."""
