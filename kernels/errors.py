"""Errors of the kernels.

Not here: errors of the engine and the services; this package knows only tensors.
"""

from __future__ import annotations


class KernelArgumentError(ValueError):
    """A tensor's shape, dtype, layout or content is not supported by the kernel."""
