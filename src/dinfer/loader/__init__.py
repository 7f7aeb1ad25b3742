"""From a checkpoint (safetensors, GGUF) to a model with its tokenizer and facts."""
