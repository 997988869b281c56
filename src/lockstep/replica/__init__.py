"""The replica: forward, backward, bucket, reduce, update."""
