"""Bytes between workers.

In the order in which a worker comes to them:

    channel, store_server, key_client, etcd, store   keys that only processes who know the run's secret can use
    routes                         by which interface another host is reached
    meeting                        find the other workers: the store, who is behind each rank, the way to them
    group                          choose a backend, open a group, use it, end it: what the rooms above call
    peers, notices                 wait for the others without waiting for ever, and say who is missing
    memory                         flat buffers that a group can send without a copy
    tree                           the order of a sum, and reductions along it: the same bits on any number of workers
    ring                           the textbook all-reduces, for comparison
    shm/                           a torch backend in shared memory
"""
