"""torchao under DataParallel: float8 and bf16 training, quantized weights."""

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep

if importlib.util.find_spec("torchao") is None:
    pytest.skip("needs torchao", allow_module_level=True)  # Imported by workers only: it takes a second or two.

BACKENDS = ["gloo", "shm"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)], nn.Linear(64, 16))


def in_float8(model, **options):
    """Its linear layers compute in float8, as far as CPUs can: values are rounded, products are not faster."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **options))


def train(world, dtype, zero):
    model = in_float8(net().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = lockstep.DataParallel(model, optimizer=optimizer, zero=zero)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        x, y = torch.randn(16, 64, generator=generator).to(dtype), torch.randint(16, (16,), generator=generator)
        mine = slice(world.rank, None, world.size)
        F.cross_entropy(wrapped(x[mine]).float(), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with wrapped.whole_params():
        return torch.cat([param.detach().float().flatten() for param in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_layers_train_alike_however_they_are_split(pool, dtype):
    """With one worker they round by the largest of the whole batch, with two by that of each half."""
    (alone,) = pool.run(1, train, dtype, 0)
    way = (alone - torch.cat([param.detach().flatten() for param in net().parameters()])).norm()
    first = pool.run(2, train, dtype, 0)
    for zero in (0, 1, 3):
        for weights in pool.run(2, train, dtype, zero):
            assert torch.equal(weights, first[0])
    assert (first[0] - alone).norm() < 0.25 * way


def refused(world, kind, zero):
    model = net()
    if kind == "gathered":
        in_float8(model, enable_fsdp_float8_all_gather=True)
    else:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model[:3], Int8WeightOnlyConfig())
        for param in model[:3].parameters():
            param.requires_grad_(False)
    if kind == "ignored":
        names = [name for name, param in model.named_parameters() if not param.requires_grad]
        lockstep.DataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    wrapped = lockstep.DataParallel(model, optimizer=optimizer, zero=zero)
    wrapped(torch.ones(2, 64)).sum().backward()
    return model[3].bias.grad is not None


def test_weights_made_of_other_tensors_are_refused_where_their_memory_counts(pool):
    for kind, zero in (("gathered", 1), ("gathered", 3), ("frozen", 0)):
        for is_well, text in pool.run(2, refused, kind, zero, expect_failure=True):
            assert not is_well and "made of other tensors" in text, text
    assert all(pool.run(2, refused, "gathered", 0)) and all(pool.run(2, refused, "ignored", 0))
