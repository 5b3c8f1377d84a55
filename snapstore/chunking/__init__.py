"""Where streams are cut into chunks: pure functions of their bytes, one cutter per class of data."""
