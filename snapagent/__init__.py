"""The node agent: captures live processes straight into a store and restores them out of it.

It moves bytes and owns processes; what a snapshot is and how it is stored is `snapstore`'s
business, of which it uses only what that package exports.
"""
