"""Programs for working on snapstore: the demo, benchmarks, vectors, checks of the tree."""
