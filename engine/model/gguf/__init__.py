"""GGUF files: served by way of a folder that says in Hugging Face's terms what the file says in llama.cpp's."""
