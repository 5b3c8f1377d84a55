"""The daemon: HTTP over a Unix socket. The only place with asyncio."""
