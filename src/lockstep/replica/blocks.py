"""Which parameters are needed together: the blocks of a model, whose parameters are gathered and released as one.

Models are built of lists of like modules: the layers of a transformer, the stages of a ResNet. Each member of such a
list is a block; what is in none (embeddings, heads, and weights that several blocks share) belongs to the model itself
and stays gathered from the beginning of a forward pass to the end of the backward pass. Pure, but for reading modules.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.errors import UsageError


def find_blocks(module: nn.Module, wanted: Sequence[str | type[nn.Module]] | None = None) -> list[nn.Module]:
    """The blocks of `module` in registration order: those `wanted` by name or class, else members of lists."""
    if wanted is None:
        return _members_of_lists(module)
    names = {each for each in wanted if isinstance(each, str)}
    classes = tuple(each for each in wanted if isinstance(each, type))
    named = [(name, child) for name, child in module.named_modules() if child is not module]
    if unknown := names - {name for name, _ in named}:
        raise UsageError(f"blocks={sorted(unknown)}: the model has no submodules of these names.")
    blocks = [child for name, child in named if name in names or (classes and isinstance(child, classes))]
    for block in blocks:
        inner = {id(child) for child in block.modules() if child is not block}
        if any(id(other) in inner for other in blocks):
            raise UsageError(f"blocks: a block lies within another {type(block).__name__}; name only one of them.")
    if not blocks:
        raise UsageError("blocks: the model has no submodule of these classes.")
    return blocks


def _members_of_lists(module: nn.Module) -> list[nn.Module]:
    children = [child for child in module.children() if _has_params(child)]
    if isinstance(module, nn.ModuleList | nn.Sequential) and _are_alike(children):
        return children
    return [block for child in children for block in _members_of_lists(child)]


def _are_alike(children: Sequence[nn.Module]) -> bool:
    """Whether the children are of one class with parts of its own, and not, say, a list of Linears."""
    classes = {type(child) for child in children}
    return len(children) > 1 and len(classes) == 1 and all(any(True for _ in child.children()) for child in children)


def _has_params(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def assign(module: nn.Module, params: Sequence[Tensor], blocks: Sequence[nn.Module]) -> list[int]:
    """For each parameter the number of its block, or -1 if it belongs to the model itself."""
    users: dict[int, set[int]] = {id(param): {-1} for param in _outside(module, blocks)}
    for number, block in enumerate(blocks):
        for param in block.parameters():
            users.setdefault(id(param), set()).add(number)
    return [next(iter(own)) if len(own := users.get(id(param), {-1})) == 1 else -1 for param in params]


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters of submodules that are in no block."""
    inside = {id(child) for block in blocks for child in block.modules()}
    owners = [child for child in module.modules() if id(child) not in inside]
    return [param for owner in owners for param in owner._parameters.values() if param is not None]
