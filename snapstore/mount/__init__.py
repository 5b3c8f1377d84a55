"""Snapshots as volumes: a read-only FUSE file system over one snapshot, or over all names.

Needs the extra `fuse` (pyfuse3 with trio); `session` and what it imports are loaded only to mount.
One thread answers the kernel; whatever waits for a store or decodes runs on a bounded number of
other threads. That one thread alone touches the tables of what is in memory, so there are no locks.
"""
