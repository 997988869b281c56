"""`lockstep bench`: what things take on this machine, the variants side by side in one run.

catalogue    workloads and variants, by name
request      what is to be measured, checked before any worker starts
interleave   times several actions in turn, and compares them
machine      what it ran on, in words; what a process uses

comm         `bench comm`: naive and ring all-reduce against the backend's own

step         `bench step` and `bench gpu`: the step of Lockstep and of its peers, in turn
crew         the workers of one or more variants, and what they do
models       what is trained: models and batches
variants     ways to train: the limit and Lockstep; everybody else in frameworks
results      what was found, as text and for programs; as a picture: plot
"""
