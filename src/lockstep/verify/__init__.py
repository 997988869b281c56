"""`lockstep verify`: a training script on one worker and on many, compared step by step.

In the order in which a verification passes through them:

    session     runs the script on one worker, then on many, and again where that tells a cause
    worker      runs in each worker's process: the script, with a recorder beside it
    recorder    what the script does in each step, seen from hooks
    quiet       randomness that cannot be the same on one worker and on many, switched off in both
    compiler    torch's, kept out
    naming      what the optimizer's tensors are called, and which part of them a worker has
    samples     the samples of a batch, by what is in them
    tensor      a torch tensor as a sketch
    sketch      a tensor in few numbers: enough to tell whether two are equal, and how far apart
    record      what one worker recorded, as files
    comparison  two runs, step by step
    batches     whether two runs saw the same samples
    blend       by which weights one worker's gradient is made of the workers' own
    causes      what the evidence points to, and how to mend it: beginning, step, samples
    outcome     the same for what came of these samples
    cause       one likely cause, in words
    verdict     bit-identical, equal within float tolerance, or different

Nothing of this is imported unless a script is verified. Only worker, recorder, quiet,
compiler, naming, samples and tensor need torch.
"""
