"""Where streams are cut into chunks: pure functions of their bytes, a cutter for each class."""
