"""A replica of the model on every worker: forward, backward, bucket, reduce, update. In the order in which to read it:

data_parallel     the wrapper, which takes the place of torch's DistributedDataParallel
wrapping          what was asked for, and whether it can be had
engine            what a wrapped model is made of, chosen once; the handle of the trainer and of checkpoints
modules           what is found in a module: parameters, buffers, blocks, what has no memory yet
collectives       what all workers do together and wait for at once
agreement         all workers start from the same values; fingerprint: a number that stands for all bits of a tensor
autograd_hooks    how a backward pass is heard of
reducer           the phases of a step: begin, arrive, finish; step_state: what is known of it
bucket_queue      the one order in which buckets leave
bucket            a flat buffer of gradients: put, launch, wait, reset; layout: which gradient lies where (pure)
reduction         how buckets are added: fast, along the tree of shards, by a wire, by a user's hook
grad_weight       by what gradients are multiplied and divided; lockstep.backward
placement         who keeps what of gradients and parameters: whole, or split (ZeRO)
params            parameters in flat memory; gathered_params: whole only while they are used; launch_order: agreed on
optimizer         the user's own, pointed at a worker's part; precision: master weights
buffers           kept equal; batch_norm: over the global batch
sparse            gradients of few rows; embedding_rows: dense ones that are nearly empty
allocator         memory that a step frees is kept for the next one
"""
