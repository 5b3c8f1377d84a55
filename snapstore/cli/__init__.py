"""The command line: one file per command, over the same façade that Python programs use."""

import gc

# Collecting while modules load finds nothing and takes a tenth of the start; `run_program` goes
# back to it.
gc.disable()
