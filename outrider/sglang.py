"""The name of SGLang's plugin: the entry point `outrider` of `sglang.srt.plugins` registers the algorithm OUTRIDER."""

from outrider.plugins.sglang import register

__all__ = ["register"]
