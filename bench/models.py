"""The models that the benchmarks train: one compact GPT in several named sizes (see lockstep.bench.gpt)."""

from lockstep.bench.gpt import GPT, SIZES, Block, Size

__all__ = ["GPT", "SIZES", "Block", "Size", "build"]


def build(name: str) -> GPT:
    """A new model of the size called `name`, its weights drawn from torch's generator."""
    if name not in SIZES:
        raise SystemExit(f"there is no model {name!r}; choose one of {', '.join(SIZES)}.")
    return GPT(SIZES[name])
