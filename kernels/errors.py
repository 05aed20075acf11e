"""Errors of the kernels.

Not here: errors of the engine and the services; this package knows only tensors.
"""

from __future__ import annotations


class KernelArgumentError(ValueError):
    """A tensor handed to a kernel has a shape, dtype, layout or content that the kernel cannot take."""
