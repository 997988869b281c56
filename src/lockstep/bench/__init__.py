"""`lockstep bench`: what things take on this machine, the variants side by side in one run.

interleave   times several actions in turn, and compares them
machine      what it ran on, in words
memory       what a process uses, and by how much that grows

comm         `bench comm`: naive and ring all-reduce against the backend's own
request      what `bench comm` is to measure, checked before any worker starts

step         `bench step` and `bench gpu`: the step of Lockstep and of its peers, in turn
crew         the workers of one or more variants, as the driver sees them
holder       what such a worker does
catalogue    their workloads and variants, by name
contest      what they are to measure, checked before any worker starts
workloads    models and batches; the models: gpt, resnet, mlp, recommender
variant      one way to train, and its step
variants     makes one by its name: ours, peer_ddp, peer_fsdp2, peer_accelerate, peer_fabric, peer_deepspeed
results      what was found; as text: table, as a picture: plot
"""
