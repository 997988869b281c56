"""`lockstep verify`: a training script on one worker and on many, compared step by step.

In the order in which a verification passes through them:

    session            runs the script on one worker, then on many, and again where that tells a cause; the verdict
    worker             runs in each worker's process: the script, with a recorder beside it
    switched_off       dropout, which cannot be the same on one worker and on many, and torch's compiler
    training_recorder  what the script does in each step, seen from hooks: backward passes, clipping, the optimizer
    forwards           the same for forward passes: samples and random numbers
    tensors            a script's tensors: their sketches, their names, the samples of a batch
    worker_record      what one worker recorded, without torch: sketches of tensors, steps
    comparison         two runs, step by step
    evidence           which samples many workers saw; by which weights their gradients make one worker's
    causes             what the evidence points to, and how to mend it

Nothing of this is imported unless a script is verified. Only worker, switched_off, training_recorder, forwards and
tensors need torch.
"""
