"""Stands in for SGLang's kernels, whose wheels are built for CUDA.

On the CPU the engine imports one of their modules, for a cache on the host, and takes its layers in
plain torch.
"""

from hollow import add_modules

__path__: list[str] = []
add_modules(__name__, "kvcacheio")
