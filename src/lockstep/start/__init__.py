"""Starting workers on this host, or on several, and seeing to it that all of them end.

In the order in which a launch passes through them:

    command     `lockstep run`: a script or module on every worker
    ssh         `lockstep run` on a list of hosts
    hosts       the launchers of several hosts: how they meet, hear of each other, and end together
    run_keys    what launchers tell each other, and hear of the workers
    elastic     who is replaced, and when a run is over whose workers come and go
    function    `lockstep.launch`: a function on every worker
    call        what such a worker runs and sends back, in a fresh interpreter or a fork
    host        what this machine offers, and a worker's environment
    supervisor  where the workers meet; waits for them, and ends them when it is time
    process     one started process, and the warden that ends it if the launcher dies
    relay       the workers' output on this process's own, line by line
    failure     who failed first, and how: tracebacks as they are kept, compared and shown
"""
