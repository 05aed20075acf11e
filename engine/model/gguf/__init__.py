"""GGUF files, served through a folder that states in Hugging Face's terms what the file states in llama.cpp's."""
