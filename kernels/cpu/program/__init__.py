"""A forward on the CPU recorded once and then run again without Python: what a CUDA graph is on a GPU."""
