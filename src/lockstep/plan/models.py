"""Architectures by name and by a few numbers: parameters tensor by tensor, operations, and what autograd keeps.

All by formulas, and without torch, so that a plan is there at once; tests hold them against the models of torch's
library, transformers and timm. Two families:

    transformers    dense or gated blocks, grouped keys and values, experts, an encoder beside the decoder; attention
                    as one fused operation that keeps its inputs, its output, and a number for each row
    convolutions    followed step by step, as a network's own forward function does

What autograd keeps is counted as eager torch keeps it: each tensor once, whoever saved it. `a` is the bytes of an
activation in the workload's precision.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan.workload import PRECISIONS, Layer, Workload

OPTIMIZER_BYTES: Mapping[str, float] = {
    "adamw": 8.0,
    "adam": 8.0,
    "lamb": 8.0,
    "lion": 4.0,
    "sgd": 0.0,
    "sgd-momentum": 4.0,
    "adam8bit": 2.0,
}
"""State of one element."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one element."""

    param: int
    grad: int
    master: int
    product: int
    """Of what products read and write."""
    residual: int
    """Of what runs past the blocks, and of what norms read."""


WIDTHS: Mapping[str, Widths] = {
    "fp32": Widths(4, 4, 0, 4, 4),
    "tf32": Widths(4, 4, 0, 4, 4),
    "amp": Widths(4, 4, 0, 2, 4),
    "bf16": Widths(2, 2, 4, 2, 2),
    "fp16": Widths(2, 2, 4, 2, 2),
    "fp8": Widths(2, 2, 4, 2, 2),
}
assert set(WIDTHS) == set(PRECISIONS)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The numbers of a transformer."""

    layers: int
    hidden: int
    vocab: int
    seq: int
    """Tokens of a sample, if it is not said."""
    heads: int = 0
    """0 for one of 64 elements each."""
    kv_heads: int = 0
    """0 for as many as heads."""
    inner: int = 0
    """Width of the feed-forward layer; 0 for four times the hidden one."""
    head_width: int = 0
    positions: int = 0
    """Learned ones."""
    is_gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    tied: bool = True
    """Whether the head has the embedding's weights."""
    experts: int = 1
    active: int = 1
    """Experts that a token goes through."""
    dropout: bool = False
    final_norm: bool = True

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        heads = self.heads or max(1, self.hidden // 64)
        each = self.head_width or self.hidden // heads
        return (self.kv_heads or heads) * each

    @property
    def q_width(self) -> int:
        """Of queries."""
        return self.head_width * self.heads if self.head_width else self.hidden


_LLAMA: dict[str, Any] = {"is_gated": True, "bias": False, "norm_bias": False, "tied": False}
_LLAMA3: dict[str, Any] = {**_LLAMA, "vocab": 128256, "seq": 8192, "kv_heads": 8}
_BERT: dict[str, Any] = {"vocab": 30522, "seq": 512, "positions": 512, "dropout": True, "final_norm": False}
_GPT2: dict[str, Any] = {"vocab": 50257, "seq": 1024, "positions": 1024, "dropout": True}

DECODERS: Mapping[str, Transformer] = {
    "gpt2": Transformer(12, 768, **_GPT2),
    "gpt2-medium": Transformer(24, 1024, **_GPT2),
    "gpt2-large": Transformer(36, 1280, **_GPT2),
    "gpt2-xl": Transformer(48, 1600, heads=25, **_GPT2),
    "gpt-10m": Transformer(7, 320, 4096, 128, heads=5, positions=128),
    "gpt-40m": Transformer(11, 512, 8192, 128, heads=8, positions=128),
    "gpt2-124m": Transformer(12, 768, 50304, 1024, positions=1024),
    "gpt2-350m": Transformer(24, 1024, 50304, 1024, positions=1024),
    "gpt3-175b": Transformer(96, 12288, 50257, 2048, heads=96, positions=2048),
    "llama-7b": Transformer(32, 4096, 32000, 2048, heads=32, inner=11008, **_LLAMA),
    "llama-13b": Transformer(40, 5120, 32000, 2048, heads=40, inner=13824, **_LLAMA),
    "llama2-70b": Transformer(80, 8192, 32000, 4096, heads=64, kv_heads=8, inner=28672, **_LLAMA),
    "llama-1b": Transformer(16, 2048, heads=32, inner=8192, **{**_LLAMA3, "tied": True}),
    "llama-3b": Transformer(28, 3072, heads=24, inner=8192, **{**_LLAMA3, "tied": True}),
    "llama-8b": Transformer(32, 4096, heads=32, inner=14336, **_LLAMA3),
    "llama-70b": Transformer(80, 8192, heads=64, inner=28672, **_LLAMA3),
    "llama-405b": Transformer(126, 16384, heads=128, inner=53248, **_LLAMA3),
    "mistral-7b": Transformer(32, 4096, 32000, 8192, heads=32, kv_heads=8, inner=14336, **_LLAMA),
    "mixtral-8x7b": Transformer(
        32, 4096, 32000, 8192, heads=32, kv_heads=8, inner=14336, experts=8, active=2, **_LLAMA
    ),
}
"""Those that predict the next token. gpt-10m to gpt2-350m are those of `lockstep bench`."""

ENCODERS: Mapping[str, Transformer] = {
    "bert-base": Transformer(12, 768, **_BERT),
    "bert-large": Transformer(24, 1024, **_BERT),
}

PAIRS: Mapping[str, Transformer] = {
    "t5-small": Transformer(6, 512, 32128, 512, heads=8, inner=2048, bias=False, norm_bias=False, dropout=True),
    "t5-base": Transformer(12, 768, 32128, 512, heads=12, inner=3072, bias=False, norm_bias=False, dropout=True),
    "t5-large": Transformer(24, 1024, 32128, 512, heads=16, inner=4096, bias=False, norm_bias=False, dropout=True),
}
"""An encoder and a decoder of as many layers."""

VISION: Mapping[str, Transformer] = {
    "vit-s16": Transformer(12, 384, 1000, 197, heads=6),
    "vit-b16": Transformer(12, 768, 1000, 197),
    "vit-l16": Transformer(24, 1024, 1000, 197),
}

ALIASES: Mapping[str, str] = {
    "gpt2-small": "gpt2",
    "gpt-40m-small": "gpt-40m",
    "gpt3": "gpt3-175b",
    "llama2-7b": "llama-7b",
    "llama2-13b": "llama-13b",
    "llama3-8b": "llama-8b",
    "llama3.1-8b": "llama-8b",
    "llama-3.1-8b": "llama-8b",
    "llama-3-8b": "llama-8b",
    "llama3-70b": "llama-70b",
    "llama-3-70b": "llama-70b",
    "llama-3.1-70b": "llama-70b",
    "llama-3.1-405b": "llama-405b",
    "mixtral": "mixtral-8x7b",
    "t5": "t5-base",
    "bert": "bert-base",
    "vit-base": "vit-b16",
    "vit-large": "vit-l16",
    "vit-b": "vit-b16",
    "vit-l": "vit-l16",
    "vit-s": "vit-s16",
    "inceptionv3": "inception-v3",
    "resnet": "resnet50",
}


def names() -> list[str]:
    """All of the catalogue."""
    return [*DECODERS, *ENCODERS, *PAIRS, *VISION, *CONVOLUTIONS]


def named(
    name: str, *, seq: int | None = None, precision: str = "bf16", optimizer: str = "adamw", **more: Any
) -> Workload:
    """A model of the catalogue; `more` are fields of Workload. What follows a known name ("BERT-large phase 1") is
    left aside."""
    key = _key_of(name)
    widths = _widths(precision)
    if key in CONVOLUTIONS:
        work = _pictures(key, widths)
    elif key in VISION:
        work = _vision(key, VISION[key], widths)
    else:
        shape = {**DECODERS, **ENCODERS, **PAIRS}[key]
        shape = replace(shape, seq=seq or shape.seq)
        make = _pair if key in PAIRS else _encoder if key in ENCODERS else _decoder
        work = make(key, shape, widths)
    return _finished(work, widths, precision, optimizer, more)


def sized(
    params: float | None,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    seq: int | None = None,
    vocab: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    name: str = "",
    **more: Any,
) -> Workload:
    """A decoder with so many parameters; what is not given is guessed from what is: see docs/plan_memory.md.

    Without `layers` or `hidden`, the shape is that of the GPTs: 128 times as wide as deep.
    """
    widths = _widths(precision)
    vocab = vocab or 50304
    if params is None and (layers is None or hidden is None):
        raise UsageError("a model by numbers needs its parameters, or its layers and its hidden width: --params 7.5B.")
    if hidden is None:
        assert params is not None
        hidden = _width_for(params, layers, vocab)
    if layers is None:
        assert params is not None
        layers = max(1, round((params - vocab * hidden) / (12 * hidden * hidden)))
    shape = Transformer(layers, hidden, vocab, seq or 2048, heads=max(1, hidden // 128), bias=False)
    work = _decoder(name or f"{layers} layers of {hidden}", shape, widths)
    if params is not None:
        work = _of_size(work, int(params), name)
    return _finished(work, widths, precision, optimizer, more)


def _width_for(params: float, layers: int | None, vocab: int) -> int:
    """The width of a decoder of so many parameters, a multiple of 64."""
    low, high = 64, 1 << 17
    while high - low > 64:
        width = (low + high) // 128 * 64
        depth = layers or max(1, width // 128)
        low, high = (width, high) if depth * 12 * width * width + vocab * width <= params else (low, width)
    return low


def _of_size(work: Workload, params: int, name: str) -> Workload:
    """The same with exactly so many parameters: what is missing is added to the blocks, or taken off them."""
    blocks = sum(layer.num_params for layer in work.layers if layer.block >= 0)
    others = work.num_params - blocks
    if params <= others:
        share = params / work.num_params
        return replace(work, layers=tuple(_scaled(layer, share) for layer in work.layers))
    share = (params - others) / blocks
    layers = [_scaled(layer, share) if layer.block >= 0 else layer for layer in work.layers]
    rest = params - sum(layer.num_params for layer in layers)
    last = max((n for n, layer in enumerate(layers) if layer.tensors), key=lambda n: max(layers[n].tensors))
    tensors = list(layers[last].tensors)
    tensors[tensors.index(max(tensors))] += rest
    layers[last] = replace(layers[last], tensors=tuple(tensors))
    return replace(work, name=name or f"{params / 1e9:.3g}B parameters", layers=tuple(layers))


def _scaled(layer: Layer, share: float) -> Layer:
    """With more or fewer parameters, and the products that they take part in."""
    tensors = tuple(max(1, round(numel * share)) for numel in layer.tensors)
    return replace(layer, tensors=tensors, forward_flops=layer.forward_flops * share)


def _key_of(name: str) -> str:
    """The name of the catalogue that `name` begins with, however it is spelled."""
    known = {re.sub(r"[^a-z0-9]", "", each): ALIASES.get(each, each) for each in (*names(), *ALIASES)}
    given = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [each for each in known if given.startswith(each) and not given[len(each) :][:1].isdigit()]
    if not found:
        near = [known[each] for each in difflib.get_close_matches(given, known, n=4, cutoff=0.5)]
        hint = f"near are {', '.join(dict.fromkeys(near))}" if near else f"there are {', '.join(names())}"
        raise UsageError(
            f"the model {name!r} is not in the catalogue: {hint}. Or describe it: --params 7.5B --layers 32 --hidden "
            "4096 --seq 2048; or plan your script: lockstep plan train.py."
        )
    return known[max(found, key=len)]


def _widths(precision: str) -> Widths:
    if precision not in WIDTHS:
        raise UsageError(f"precision {precision!r} is not known: it is one of {', '.join(PRECISIONS)}.")
    return WIDTHS[precision]


def _finished(work: Workload, widths: Widths, precision: str, optimizer: str, more: Mapping[str, Any]) -> Workload:
    key = optimizer.lower()
    if key not in OPTIMIZER_BYTES:
        raise UsageError(
            f"optimizer {optimizer!r} is not known: it is one of {', '.join(OPTIMIZER_BYTES)}. Of another one, plan a "
            "script that uses it: its state is then counted."
        )
    halves = 2 * work.num_params if precision == "amp" else 0  # Autocast keeps them from forward to backward.
    return replace(
        work,
        precision=precision,
        param_bytes=widths.param,
        grad_bytes=widths.grad,
        master_bytes=widths.master,
        optimizer=key,
        optimizer_bytes=OPTIMIZER_BYTES[key],
        buffer_bytes=work.buffer_bytes + halves,
        **more,
    )


# Transformers


def _decoder(name: str, shape: Transformer, widths: Widths) -> Workload:
    """Embeddings, blocks with a norm before each half, a norm and a head."""
    seq, hidden, vocab = shape.seq, shape.hidden, shape.vocab
    stream = seq * hidden * widths.residual
    embeddings = [vocab * hidden] + ([shape.positions * hidden] if shape.positions else [])
    # The sum is what the first block reads, and is counted there; tokens are kept to look up the gradient's rows.
    layers = [Layer("embeddings", tuple(embeddings), 0.0, seq * 8.0 + (seq * hidden if shape.dropout else 0))]
    layers += [layer for number in range(shape.layers) for layer in _block(shape, widths, number)]
    layers += _head(shape, widths, stream)
    return Workload(
        name,
        tuple(layers),
        "tokens",
        seq,
        transient_bytes=_loss_transient(shape, widths),
        input_bytes=seq * 16.0,
        embedding_params=sum(embeddings) if not shape.tied else shape.positions * hidden,
    )


def _head(shape: Transformer, widths: Widths, stream: float) -> list[Layer]:
    seq, hidden, vocab = shape.seq, shape.hidden, shape.vocab
    norm = _norm(hidden, bias=shape.norm_bias)
    kept = seq * vocab * 4.0 + seq * hidden * widths.product  # The logarithms of the probabilities, in fp32.
    products = 2.0 * seq * hidden * vocab
    tied = vocab * hidden if shape.tied else 0
    return [
        Layer("norm", norm, 0.0, stream + seq * 8.0),
        Layer("head", () if shape.tied else (vocab * hidden,), products, kept, tied=tied),
    ]


def _loss_transient(shape: Transformer, widths: Widths) -> float:
    """The gradients of the logarithms and of the logits, while the former are there still."""
    return shape.seq * shape.vocab * (8.0 + (widths.product if widths.product < 4 else 0))


def _norm(hidden: int, *, bias: bool) -> tuple[int, ...]:
    return (hidden, hidden) if bias else (hidden,)


def _linear(inputs: int, outputs: int, *, bias: bool) -> tuple[int, ...]:
    return (inputs * outputs, outputs) if bias else (inputs * outputs,)


def _block(
    shape: Transformer, widths: Widths, number: int, prefix: str = "block", *, crosses: bool = False
) -> list[Layer]:
    """Attention, a second one over the encoder's output if it `crosses`, and a feed-forward layer."""
    seq, hidden, a = shape.seq, shape.hidden, widths.product
    stream = float(seq * hidden * widths.residual)
    found = []
    for kind in ("attention", "cross") if crosses else ("attention",):
        found.append(_attention(shape, widths, f"{prefix} {number} {kind}", number))
    inner = shape.inner or 4 * hidden
    products, matrices = (3, 4) if shape.is_gated else (2, 2)
    tensors: tuple[int, ...] = _norm(hidden, bias=shape.norm_bias)
    if shape.experts > 1:
        tensors += (shape.experts * hidden,)
    for _ in range(shape.experts):
        up = _linear(hidden, inner, bias=shape.bias) * (2 if shape.is_gated else 1)
        tensors += up + _linear(inner, hidden, bias=shape.bias)
    routed = 2.0 * seq * hidden * shape.active if shape.experts > 1 else 0.0
    kept = stream + seq * 8.0 + seq * hidden * a + matrices * seq * inner * a * shape.active + routed * a
    kept += seq * hidden if shape.dropout else 0
    flops = products * 2.0 * seq * hidden * inner * shape.active
    found.append(Layer(f"{prefix} {number} feed-forward", tensors, flops, kept, block=number))
    found[0] = replace(found[0], boundary_bytes=stream)
    return found


def _attention(shape: Transformer, widths: Widths, name: str, block: int) -> Layer:
    seq, hidden, a = shape.seq, shape.hidden, widths.product
    heads = shape.heads or max(1, hidden // 64)
    q, kv = shape.q_width, shape.kv_width
    projections = _linear(hidden, q + 2 * kv, bias=shape.bias) + _linear(q, hidden, bias=shape.bias)
    if shape.is_gated:
        projections = (hidden * q, hidden * kv, hidden * kv, q * hidden)
    inside = float(seq * q * a + seq * heads * 4)
    kept = seq * hidden * widths.residual + seq * 8.0 + seq * hidden * a + seq * (q + 2 * kv) * a + inside
    kept += seq * hidden if shape.dropout else 0
    flops = 2.0 * seq * hidden * (2 * q + 2 * kv) + 4.0 * seq * seq * q
    return Layer(name, _norm(hidden, bias=shape.norm_bias) + projections, flops, kept, inside, block=block)


def _encoder(name: str, shape: Transformer, widths: Widths) -> Workload:
    """BERT, which predicts tokens that were masked: norms after each half, and a layer before the head."""
    seq, hidden, a = shape.seq, shape.hidden, widths.product
    row = float(seq * hidden)
    embeddings = (shape.vocab * hidden, shape.positions * hidden, 2 * hidden, *_norm(hidden, bias=True))
    layers = [Layer("embeddings", embeddings, 0.0, 24.0 * seq + row * (widths.residual + 1))]
    # What a block reads is its norm's output or, with dropout, that; the sums before norms are kept as well.
    layers += [layer for number in range(shape.layers) for layer in _block(shape, widths, number)]
    transform = _linear(hidden, hidden, bias=True) + _norm(hidden, bias=True) + (shape.vocab,)
    products = 2.0 * row * hidden + 2.0 * row * shape.vocab
    kept = 4.0 * seq * shape.vocab + row * (2 * a + 2 * widths.residual)
    layers.append(Layer("head", transform, products, kept, tied=shape.vocab * hidden))
    work = Workload(name, tuple(layers), "tokens", seq, input_bytes=32.0 * seq)
    extra = (shape.positions + 2) * hidden
    return replace(work, transient_bytes=_loss_transient(shape, widths), embedding_params=extra)


def _pair(name: str, shape: Transformer, widths: Widths) -> Workload:
    """T5: positions by a table of 32 distances in the first layer of each half."""
    seq, hidden = shape.seq, shape.hidden
    stream = float(seq * hidden * widths.residual)
    table = 32 * shape.heads
    scores = float(shape.heads * seq * seq * (2 * widths.product + 1))  # With a bias, attention is not fused.
    layers = [Layer("embeddings", (shape.vocab * hidden,), 0.0, 16.0 * seq)]
    for half in range(2):
        for number in range(shape.layers):
            block = half * shape.layers + number
            made = _block(shape, widths, block, "decoder" if half else "encoder", crosses=bool(half))
            for layer in made:
                inside = scores if "feed-forward" not in layer.name else 0.0
                kept = layer.activation_bytes + inside
                layers.append(replace(layer, activation_bytes=kept, attention_bytes=layer.attention_bytes + inside))
            if number == 0:
                first = len(layers) - len(made)
                layers[first] = replace(layers[first], tensors=(*layers[first].tensors, table))
        if not half:
            layers.append(Layer("encoder norm", (hidden,), 0.0, stream))
    layers += _head(shape, widths, stream)
    transient = _loss_transient(shape, widths)
    return Workload(name, tuple(layers), "tokens", seq, transient_bytes=transient, input_bytes=32.0 * seq)


def _vision(name: str, shape: Transformer, widths: Widths) -> Workload:
    """Patches of 16 x 16 of a picture of 224 x 224, and a token for its class."""
    hidden, side = shape.hidden, 224
    patches = shape.seq - 1
    stem = (hidden, shape.seq * hidden, *_linear(3 * 16 * 16, hidden, bias=True))
    pixels = 3.0 * side * side * 4
    layers = [Layer("patches", stem, 2.0 * patches * 768 * hidden, pixels if widths.product == 4 else pixels / 2)]
    layers += [layer for number in range(shape.layers) for layer in _block(shape, widths, number)]
    stream = float(shape.seq * hidden * widths.residual)
    head = (*_norm(hidden, bias=True), *_linear(hidden, shape.vocab, bias=True))
    layers.append(Layer("head", head, 2.0 * hidden * shape.vocab, stream + 4.0 * shape.vocab))
    transient = 3.0 * shape.seq * 4 * hidden * widths.product
    return Workload(name, tuple(layers), "images", 1, transient_bytes=transient, input_bytes=pixels)


# Convolutions


@dataclass(slots=True)
class Picture:
    """A network that is being followed, and the picture that it has come to."""

    a: int
    channels: int
    height: int
    width: int
    layers: list[Layer] = field(default_factory=list)
    buffer_bytes: int = 0
    block: int = -1
    busiest: float = 0.0
    """The most bytes at a time in a backward pass: what is kept up to a layer, and gradients around it."""

    def conv(
        self,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        pad: int | tuple[int, int] = 0,
        *,
        norm: bool = True,
        acts: bool = True,
        name: str = "conv",
    ) -> "Picture":
        """A convolution, its batch norm (else a bias) and its ReLU, which works in place."""
        down, across = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad_down, pad_across = (pad, pad) if isinstance(pad, int) else pad
        height = (self.height + 2 * pad_down - down) // stride + 1
        width = (self.width + 2 * pad_across - across) // stride + 1
        weights = down * across * self.channels * channels
        place = height * width
        out = float(place * channels * self.a)
        kept = out * norm + out * acts  # What the norm reads, and what the ReLU made, which the next one reads.
        flops = 2.0 * weights * place
        fast = flops if (down, across, stride) == (3, 3, 1) else 0.0
        tensors = (weights, channels, channels) if norm else (weights, channels)
        number = len(self.layers)
        self.layers.append(Layer(f"{name} {number}", tensors, flops, kept, block=self.block, winograd_flops=fast))
        self.buffer_bytes += (8 * channels + 8) if norm else 0
        kept_so_far = sum(layer.activation_bytes for layer in self.layers)
        self.busiest = max(self.busiest, kept_so_far + 2 * out)
        self.channels, self.height, self.width = channels, height, width
        return self

    def pool(self, kernel: int, stride: int, pad: int = 0, *, ceil: bool = False, indexed: bool = True) -> "Picture":
        """Of maxima, whose places are kept in 8 bytes; or, not `indexed`, of means."""
        round_up = (stride - 1) if ceil else 0
        self.height = (self.height + 2 * pad - kernel + round_up) // stride + 1
        self.width = (self.width + 2 * pad - kernel + round_up) // stride + 1
        out = float(self.height * self.width * self.channels)
        self._keep(out * self.a + (8 * out if indexed else 0))
        return self

    def linear(self, outputs: int, *, acts: bool = False, dropout: bool = False) -> "Picture":
        """A product with all that there is."""
        inputs = self.channels * self.height * self.width
        kept = float(outputs * self.a * (acts + dropout) + outputs * dropout)
        tensors = (inputs * outputs, outputs)
        self.layers.append(Layer(f"linear {len(self.layers)}", tensors, 2.0 * inputs * outputs, kept))
        self.channels, self.height, self.width = outputs, 1, 1
        return self

    def branch(self) -> "Picture":
        """Another way from here, whose layers are in the same network."""
        return replace(self, buffer_bytes=0)

    def join(self, *branches: "Picture") -> "Picture":
        """Side by side; the whole is a new tensor."""
        self.channels = sum(each.channels for each in branches)
        self.height, self.width = branches[0].height, branches[0].width
        self.buffer_bytes += sum(each.buffer_bytes for each in branches)
        self.busiest = max(self.busiest, *(each.busiest for each in branches))
        self._keep(float(self.channels * self.height * self.width * self.a))
        return self

    def _keep(self, num_bytes: float) -> None:
        last = self.layers[-1]
        self.layers[-1] = replace(last, activation_bytes=last.activation_bytes + num_bytes)


def _pictures(name: str, widths: Widths) -> Workload:
    follow, side = CONVOLUTIONS[name]
    picture = Picture(widths.product, 3, side, side)
    follow(picture)
    pixels = 3.0 * side * side
    first = picture.layers[0]
    picture.layers[0] = replace(first, activation_bytes=first.activation_bytes + pixels * widths.product)
    kept = sum(layer.activation_bytes for layer in picture.layers)
    return Workload(
        name,
        tuple(picture.layers),
        "images",
        1,
        buffer_bytes=picture.buffer_bytes,
        transient_bytes=max(0.0, picture.busiest - kept),
        input_bytes=4 * pixels,
    )


def _resnet(counts: tuple[int, ...], *, deep: bool) -> Callable[[Picture], None]:
    """Residual blocks of two convolutions, or, `deep`, of three around a narrow middle."""

    def follow(picture: Picture) -> None:
        picture.conv(64, 7, 2, 3).pool(3, 2, 1)
        for stage, count in enumerate(counts):
            width = 64 << stage
            outputs = width * (4 if deep else 1)
            for number in range(count):
                stride = 2 if stage and not number else 1
                picture.block += 1
                before = (picture.channels, picture.height, picture.width)
                first = len(picture.layers)
                if deep:
                    picture.conv(width, 1).conv(width, 3, stride, 1).conv(outputs, 1)
                else:
                    picture.conv(width, 3, stride, 1).conv(outputs, 3, 1, 1)
                after = (picture.channels, picture.height, picture.width)
                if stride > 1 or before[0] != outputs:
                    picture.channels, picture.height, picture.width = before
                    picture.conv(outputs, 1, stride, acts=False)
                    picture.channels, picture.height, picture.width = after
                boundary = float(math.prod(before) * picture.a)
                picture.layers[first] = replace(picture.layers[first], boundary_bytes=boundary)
        picture.block = -1
        picture.pool(picture.height, 1, indexed=False).linear(1000)

    return follow


def _vgg(*stages: int) -> Callable[[Picture], None]:
    def follow(picture: Picture) -> None:
        for width, count in zip((64, 128, 256, 512, 512), stages, strict=True):
            for _ in range(count):
                picture.conv(width, 3, 1, 1, norm=False)
            picture.pool(2, 2)
        picture.linear(4096, acts=True, dropout=True).linear(4096, acts=True, dropout=True).linear(1000)

    return follow


def _inception(picture: Picture) -> None:
    """Inception-v3 with its second head, by which it is trained."""
    picture.conv(32, 3, 2).conv(32, 3).conv(64, 3, 1, 1).pool(3, 2).conv(80, 1).conv(192, 3).pool(3, 2)
    for pooled in (32, 64, 64):
        picture.join(
            picture.branch().conv(64, 1),
            picture.branch().conv(48, 1).conv(64, 5, 1, 2),
            picture.branch().conv(64, 1).conv(96, 3, 1, 1).conv(96, 3, 1, 1),
            picture.branch().pool(3, 1, 1, indexed=False).conv(pooled, 1),
        )
    picture.join(
        picture.branch().conv(384, 3, 2),
        picture.branch().conv(64, 1).conv(96, 3, 1, 1).conv(96, 3, 2),
        picture.branch().pool(3, 2),
    )
    flat, tall = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    for width in (128, 160, 160, 192):
        picture.join(
            picture.branch().conv(192, 1),
            picture.branch().conv(width, 1).conv(width, flat[0], 1, flat[1]).conv(192, tall[0], 1, tall[1]),
            picture.branch()
            .conv(width, 1)
            .conv(width, tall[0], 1, tall[1])
            .conv(width, flat[0], 1, flat[1])
            .conv(width, tall[0], 1, tall[1])
            .conv(192, flat[0], 1, flat[1]),
            picture.branch().pool(3, 1, 1, indexed=False).conv(192, 1),
        )
    second = picture.branch().pool(5, 3, indexed=False).conv(128, 1).conv(768, 5).linear(1000)
    picture.buffer_bytes += second.buffer_bytes
    picture.join(
        picture.branch().conv(192, 1).conv(320, 3, 2),
        picture.branch().conv(192, 1).conv(192, (1, 7), 1, (0, 3)).conv(192, (7, 1), 1, (3, 0)).conv(192, 3, 2),
        picture.branch().pool(3, 2),
    )
    for _ in range(2):
        middle = picture.branch().conv(384, 1)
        deep = picture.branch().conv(448, 1).conv(384, 3, 1, 1)
        picture.join(
            picture.branch().conv(320, 1),
            middle.branch().conv(384, (1, 3), 1, (0, 1)),
            middle.branch().conv(384, (3, 1), 1, (1, 0)),
            deep.branch().conv(384, (1, 3), 1, (0, 1)),
            deep.branch().conv(384, (3, 1), 1, (1, 0)),
            picture.branch().pool(3, 1, 1, indexed=False).conv(192, 1),
        )
        picture.buffer_bytes += middle.buffer_bytes + deep.buffer_bytes
    picture.pool(picture.height, 1, indexed=False).linear(1000)


CONVOLUTIONS: Mapping[str, tuple[Callable[[Picture], None], int]] = {
    "resnet18": (_resnet((2, 2, 2, 2), deep=False), 224),
    "resnet34": (_resnet((3, 4, 6, 3), deep=False), 224),
    "resnet50": (_resnet((3, 4, 6, 3), deep=True), 224),
    "resnet101": (_resnet((3, 4, 23, 3), deep=True), 224),
    "resnet152": (_resnet((3, 8, 36, 3), deep=True), 224),
    "vgg11": (_vgg(1, 1, 2, 2, 2), 224),
    "vgg16": (_vgg(2, 2, 3, 3, 3), 224),
    "vgg19": (_vgg(2, 2, 4, 4, 4), 224),
    "inception-v3": (_inception, 299),
}
"""How each is followed, and the side of its pictures."""
