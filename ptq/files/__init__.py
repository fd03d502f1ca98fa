"""Files: safetensors and their headers, checkpoints as they are read and written, locks, and what MODEL stands for."""
