"""The GPUs of this machine: the CUDA driver, and what the agent does with it."""
