"""What Linux offers and Python does not: the only place of the agent with `ctypes`."""
