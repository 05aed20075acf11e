"""The gated delta rule with its short convolution and its gated norm (Qwen3-Next, Qwen3.5)."""
