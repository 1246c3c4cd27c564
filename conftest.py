"""Files that pytest must not import: scripts that run in another environment, and kernels where there is no Triton."""

from importlib.util import find_spec

collect_ignore = ["tests/integrations/verifiers_legacy_run.py"]
if find_spec("triton") is None:
    collect_ignore.append("turnwise/generate/blocks/kernels.py")
