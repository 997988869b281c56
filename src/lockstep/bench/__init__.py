"""`lockstep bench`: what things take on this machine, the variants side by side in one run.

request      what is to be measured, checked before any worker starts
comm         naive and ring all-reduce against the backend's own
interleave   times several actions in turn, and compares them
machine      what it ran on, in words
"""
