"""What a node keeps of stores, for all of its processes: `docs/node-cache.md`.

`node_cache.NodeCache` is what others use. It has two tiers: `stored` keeps ranges of objects as the
store has them, on disk; `decoded` keeps contents of files, in memory. `room` counts what they take.

Invariants, which the tests refer to:

- N1. Nothing is given to a reader that was not checked after it came from the store: stored bytes
  against the checksum of their block, taken when they came, and then by whoever decodes them;
  decoded bytes before they are marked as there.
- N2. A mark is set after what it stands for was written, and never taken back while the file has
  its name. Who is killed between the two leaves bytes that nobody reads.
- N3. What is found to be damaged is dropped, named in the log, and fetched again; the reader sees
  an error only if the store has one.
- N4. Of those who want the same bytes at the same time one fetches them, the others wait. Its
  claim is a lock of the kernel, gone with its process; who has waited too long fetches for itself.
- N5. A tier takes no more than its budget, but for what is being written at the moment. What was
  not used for longest goes first. What is pinned stays, and so does decoded content that is open.
- N6. No failure of the cache (no room, no permission, no locks, a directory that vanished) is one
  of its readers: they read past it.
- N7. A directory that others could have prepared is refused: of another owner, writable by others,
  a symbolic link, or full of other things.
- N8. What came from one store is given to readers of another only where its digest is known to
  the latter: stored bytes are kept for each store apart, decoded ones under their chunks' digest.
"""
