"""`hosts`, a torch.distributed backend for CPU workers of several hosts, of which some have more than one.

Within a host bytes go through shared memory, between hosts each crosses the network once for all workers of a host:
operations.py says how. `import lockstep` makes the name known, as that of `shm`.
"""
