"""`lockstep demo`: train something real on this machine, and measure what the library promises while doing so.

gpt        the model, and how it is trained
train_gpt  the training itself, and the bytes to learn: written as users would write theirs
examiner   what is measured meanwhile, compared with one worker, and found
"""
