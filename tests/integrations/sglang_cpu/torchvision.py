"""Stands in for torchvision, whose wheels are built for CUDA: SGLang imports it for images, which
nobody sends here."""

from hollow import add_modules

__path__: list[str] = []
add_modules(
    __name__,
    "io",
    "ops",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)
