"""`lockstep demo`: train something real on this machine, and measure what the library promises while doing so.

corpus      the bytes to learn: Python's own standard library
gpt         the model, in a few sizes
recipe      what is trained, and how
single      the same training on one worker, for comparison
stopwatch   where a step's time goes
findings    what was measured, and whether it is as promised
progress    how far it is, in a terminal or a log
training    the training itself: written as users would write theirs
"""
