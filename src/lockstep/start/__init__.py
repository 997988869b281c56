"""Starting workers on this host, and seeing to it that all of them end.

In the order in which a launch passes through them:

    command     `lockstep run`: a script or module on every worker
    function    `lockstep.launch`: a function on every worker
    signals     by which the launcher is told to end
    host        what this machine offers: cores, GPUs
    variables   a worker's environment
    meeting     the place where the workers meet, served by the launcher
    warden      ends the workers if the launcher dies
    fresh       workers that are fresh interpreters
    forked      workers that are forks of this process
    call        what such a worker runs
    report      what it sends back
    worker      one started process
    supervisor  waits for the workers and ends them when it is time
    lines       bytes into lines, progress bars included
    last_words  the end of a worker's stderr, with its traceback whole
    relay       the workers' output on this process's own
    failure     who failed first, and how, in words
"""
