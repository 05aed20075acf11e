"""GGUF files: written for the peer llama.cpp, and compared with transformers' reader."""
