"""The catalogue against published counts, and against the models of torch's library, transformers and timm."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.bench import models as bench
from lockstep.errors import UsageError
from lockstep.plan import models
from lockstep.plan.tracing import trace_step

full = pytest.mark.skipif("FULL" not in os.environ, reason="imports large libraries; set FULL=1")

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-8b": 8_030_261_248,
    "llama2-70b": 68_976_648_192,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base": 109_514_298,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "inception-v3": 27_161_264,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameters_are_as_published(name: str, count: int) -> None:
    assert models.named(name).num_params == count


@pytest.mark.parametrize("name", ["gpt-10m", "gpt-40m", "gpt2-124m"])
def test_gpts_of_the_bench(name: str) -> None:
    with torch.device("meta"):
        net = bench.build(name)
    work = models.named(name)
    assert work.num_params == sum(param.numel() for param in net.parameters())
    assert sorted(numel for layer in work.layers for numel in layer.tensors) == sorted(
        param.numel() for param in net.parameters()
    )


def test_what_autograd_keeps_of_a_gpt() -> None:
    work = models.named("gpt-10m", precision="fp32")
    kept = saved_bytes(
        lambda: bench.build("gpt-10m"), lambda net: net(*bench.batches("gpt-10m", 4, 0, torch.device("cpu"))[0])
    )
    assert 4 * work.activation_bytes == pytest.approx(kept, rel=0.03)


def test_peak_and_operations_of_a_gpt() -> None:
    def build() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        net = bench.build("gpt-10m")
        return net, bench.batches("gpt-10m", 4, 0, torch.device("cpu"))[0], torch.optim.AdamW(net.parameters())

    trace, work = trace_step(build), models.named("gpt-10m", precision="fp32")
    assert 4 * (work.activation_bytes + work.transient_bytes) == pytest.approx(trace.activation_peak, rel=0.05)
    assert 4 * work.forward_flops == pytest.approx(sum(trace.layer_flops), rel=0.03)
    assert trace.state_bytes == pytest.approx(8 * work.num_params, rel=0.001)


@pytest.mark.parametrize(("layers", "hidden"), [(32, 4096), (None, 4096), (32, None), (None, None), (4, 256)])
def test_sizes_are_met_exactly(layers: int | None, hidden: int | None) -> None:
    work = models.sized(7.5e9, layers=layers, hidden=hidden, seq=2048)
    assert work.num_params == 7_500_000_000
    assert layers is None or work.num_blocks() == layers
    assert all(numel > 0 for layer in work.layers for numel in layer.tensors)


def test_names_are_found_however_they_are_spelled() -> None:
    spelled = {
        "ResNet-50": "resnet50",
        "BERT-large phase 1": "bert-large",
        "Llama-3.1-8B eager": "llama-8b",
        "GPT2_XL": "gpt2-xl",
    }
    assert {name: models.named(name).name for name in spelled} == spelled


def test_what_is_not_known_is_said_with_what_is_near() -> None:
    with pytest.raises(UsageError, match="gpt2-xl"):
        models.named("gtp2-xl")
    with pytest.raises(UsageError, match="--params"):
        models.named("resnet500")
    with pytest.raises(UsageError, match="adamw"):
        models.named("gpt2", optimizer="muon9")
    with pytest.raises(UsageError, match="bf16"):
        models.named("gpt2", precision="fp12")


def saved_bytes(build: Callable[[], nn.Module], call: Callable[[nn.Module], Tensor], *, is_fake: bool = True) -> int:
    """What autograd keeps until the backward pass, each storage once, without parameters and buffers."""
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext():
        net = build()
        own = {tensor.untyped_storage()._cdata for tensor in (*net.parameters(), *net.buffers())}
        kept: dict[int, tuple[int, Any]] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = (storage.nbytes(), storage)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = call(net)
        assert loss.requires_grad
        return sum(num_bytes for num_bytes, _ in kept.values())


# Against the libraries' own models


@full
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "vgg11", "vgg16", "inception-v3"])
def test_convolutions_of_torchvision(name: str) -> None:
    vision = pytest.importorskip("torchvision.models")
    if name == "inception-v3":
        make, side = lambda: vision.inception_v3(init_weights=False), 299
    else:
        make, side = getattr(vision, name), 224
    with torch.device("meta"):
        net = make()
    work = models.named(name, precision="fp32")
    assert sorted(numel for layer in work.layers for numel in layer.tensors) == sorted(
        p.numel() for p in net.parameters()
    )

    def call(net: nn.Module) -> Tensor:
        out = net(torch.zeros(2, 3, side, side))
        return out[0].sum() + out[1].sum() if isinstance(out, tuple) else out.sum()  # Inception's has two heads.

    assert 2 * work.activation_bytes == pytest.approx(saved_bytes(make, call), rel=0.05)


@full
@pytest.mark.parametrize("name", ["vit-s16", "vit-b16", "vit-l16"])
def test_vision_transformers_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    spelled = {"s": "small", "b": "base", "l": "large"}[name[4]]
    work = models.named(name, precision="fp32")
    with torch.device("meta"):
        net = timm.create_model(f"vit_{spelled}_patch16_224")
    assert work.num_params == sum(param.numel() for param in net.parameters())
    if name == "vit-s16":  # timm asks for values while it builds one, so not on fake tensors.
        make = lambda: timm.create_model("vit_small_patch16_224")
        kept = saved_bytes(make, lambda net: net(torch.zeros(2, 3, 224, 224)).sum(), is_fake=False)
        assert 2 * work.activation_bytes == pytest.approx(kept, rel=0.05)


@full
@pytest.mark.parametrize(
    "name",
    ["gpt2", "gpt2-xl", "bert-base", "bert-large", "t5-small", "t5-base", "llama-8b", "mistral-7b", "mixtral-8x7b"],
)
def test_transformers_of_transformers(name: str) -> None:
    hf = pytest.importorskip("transformers")
    llama = {"num_key_value_heads": 8, "intermediate_size": 14336, "hidden_size": 4096, "num_hidden_layers": 32}
    makers: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config()),
        "gpt2-xl": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
        "bert-base": lambda: hf.BertForMaskedLM(hf.BertConfig()),
        "bert-large": lambda: hf.BertForMaskedLM(
            hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        ),
        "t5-small": lambda: hf.T5ForConditionalGeneration(hf.T5Config()),
        "t5-base": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
        ),
        "llama-8b": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=128256, **llama)),
        "mistral-7b": lambda: hf.MistralForCausalLM(hf.MistralConfig(vocab_size=32000, **llama)),
        "mixtral-8x7b": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=32000, **llama)),
    }
    with torch.device("meta"):
        net = makers[name]()
    assert models.named(name).num_params == sum(param.numel() for param in net.parameters())
