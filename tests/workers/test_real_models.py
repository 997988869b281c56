"""Small models of transformers, timm and torchvision, of random weights, trained 5 steps on 2 workers as on one.

One table: a row is a model, a column how it is trained. FULL=1 runs all of it.
"""

import copy
import functools

import pytest
import torch
from amount import some
from torch import nn
from vision import import_torchvision, mend_torchvision

import lockstep

STEPS, BATCH = 5, 8
DTYPE = torch.double
"""Rounding grows within a few steps of a network with batch norms, or with LBFGS, and is not what is looked for."""
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def ids(step, length=12, vocabulary=50):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, vocabulary, (BATCH, length), generator=generator)


def images(step, size=32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.double)


def of_transformers(name, config, **options):
    """A model that computes its loss from input ids; `config` holds the sizes, by transformers' names."""
    mend_torchvision()
    transformers = pytest.importorskip("transformers")
    settings = getattr(transformers, config)(vocab_size=50, **options)
    settings._experts_implementation = "eager"  # The others compute in single precision only.
    model = getattr(transformers, name)(settings)
    return model, ids, lambda output: output.loss


def classifier(model):
    return model, images, lambda output: (getattr(output, "logits", output)).square().mean()


def of_timm(name, **options):
    mend_torchvision()
    timm = pytest.importorskip("timm")
    return classifier(lockstep.SyncBatchNorm.convert(timm.create_model(name, num_classes=5, **options)))


def of_torchvision(name, **options):
    model = getattr(import_torchvision().models, name)(num_classes=5, **options)
    return classifier(lockstep.SyncBatchNorm.convert(model))


def vit_of_transformers():
    mend_torchvision()
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.0, **sizes)
    return classifier(transformers.ViTForImageClassification(config))


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
LLAMA = {**BERT, "num_key_value_heads": 1}

MODELS = {
    "gpt2": functools.partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", **GPT2),
    "bert": functools.partial(
        *(of_transformers, "BertForMaskedLM", "BertConfig"),
        **{**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": functools.partial(
        *(of_transformers, "T5ForConditionalGeneration", "T5Config"), **T5, decoder_start_token_id=0, pad_token_id=0
    ),
    "llama": functools.partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "mixtral": functools.partial(
        of_transformers, "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=1
    ),
    "vit": vit_of_transformers,
    "timm resnet10t": functools.partial(of_timm, "resnet10t"),
    "timm vit": functools.partial(of_timm, "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24),
    "timm convnext": functools.partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64)),
    "torchvision resnet18": functools.partial(of_torchvision, "resnet18"),
    "torchvision mobilenet": functools.partial(of_torchvision, "mobilenet_v3_small", dropout=0.0),
    "torchvision shufflenet": functools.partial(of_torchvision, "shufflenet_v2_x0_5"),
}
WAYS = ("plain", "checkpointed", "scaled", "lbfgs", "compiled before", "compiled after", "copied")


def made(model):
    torch.manual_seed(0)
    return MODELS[model]()


def checkpoint(net):
    """Have the net compute its blocks again in the backward pass, by whatever it calls that."""
    if hasattr(net, "gradient_checkpointing_enable"):
        net.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(net, "set_grad_checkpointing"):
        net.set_grad_checkpointing()
    else:
        for name, child in net.named_children():
            if isinstance(child, nn.Sequential) and not any(
                isinstance(each, lockstep.SyncBatchNorm) for each in child.modules()
            ):
                setattr(net, name, Again(child))


class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def trained(model, way, world=None):
    """The weights after some steps; on one worker without Lockstep around the model."""
    net, data, loss_of = made(model)
    net.to(DTYPE).train()
    if way == "checkpointed":
        checkpoint(net)
    wrapped = torch.compile(net, backend="aot_eager") if way == "compiled before" else net
    if world is not None:
        wrapped = lockstep.DataParallel(wrapped)
    if way == "copied" and world is not None:
        wrapped = copy.deepcopy(wrapped)
        net = wrapped.module
    if way == "compiled after":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    if way == "lbfgs":
        optimizer = torch.optim.LBFGS(wrapped.parameters(), lr=0.01, max_iter=3, history_size=3)
    else:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=way == "scaled")
    for step in range(STEPS):
        whole = data(step)
        x = whole if world is None else whole.chunk(world.size)[world.rank]

        def closure():
            optimizer.zero_grad()
            output = wrapped(x, labels=x) if data is ids else wrapped(x)
            loss = loss_of(output)
            scaler.scale(loss).backward()
            return loss.detach() if world is None else world.mean(loss.detach())

        if way == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
    return {name.removeprefix("_orig_mod."): param.detach() for name, param in net.named_parameters()}


def as_numpy(world, model, way):
    return {name: value.numpy() for name, value in trained(model, way, world).items()}


SELECTION = [
    *(("gpt2", "checkpointed"), ("t5", "copied"), ("bert", "lbfgs"), ("timm vit", "scaled")),
    ("torchvision resnet18", "plain"),
]


@pytest.mark.parametrize(("model", "way"), some(SELECTION, [(model, way) for model in MODELS for way in WAYS]))
def test_two_workers_train_as_one(pool, model, way):
    wanted = trained(model, way.replace("compiled after", "plain").replace("compiled before", "plain"))
    results = pool.run(2, as_numpy, model, way, timeout=50)
    begun = {name: param.detach() for name, param in made(model)[0].to(DTYPE).named_parameters()}
    assert any(not torch.equal(wanted[name], begun[name]) for name in wanted)
    for found in results:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                torch.from_numpy(found[name]), value, **TOLERANCE, msg=lambda text: f"{name}: {text}"
            )
            assert (found[name] == results[0][name]).all(), name
