"""Chat on real weights, with peers in the same run: `python -m benchmarks.real_chat FILE.gguf`."""
