"""An export as files: text that is read and never run, and the state as safetensors."""
