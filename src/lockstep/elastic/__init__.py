"""A lost worker costs no step: who trains now, and the step as a transaction.

coordinator   decides who belongs to a generation; in the launcher
recovery      what a trainer's call does when its world breaks, or is to change; in every worker
snapshots     copies of what is split over the workers, in the memory of others
live          the same where it is, in memory that outlives its owners
balance       shards move away from slow workers
transfer      a training run's state, from who has it to who has not
"""
