"""Models of transformers from random configurations, in a loop of one's own: `kind=mixtral`, `t5` or `vit`."""

import torch
import transformers
from options import double, program
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"not_sharded": "the loader is not sharded"}


def built(kind, generator):
    """A model, the rows of its data, and what a batch is called."""
    words = torch.randint(3, 40, (40, 9), generator=generator)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        )  # fmt: skip
        config._experts_implementation = "eager"  # The others compute in single precision only.
        return transformers.MixtralForCausalLM(config), [words, words], ["input_ids", "labels"]
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config), [words, words.flip(1)], ["input_ids", "labels"]
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    images, labels = torch.randn(40, 3, 16, 16, generator=generator), torch.randint(3, (40,), generator=generator)
    return transformers.ViTForImageClassification(config), [images, labels], ["pixel_values", "labels"]


def main(kind="t5", zero=0, mistake=None, compiled=0, steps=4):
    lockstep.join()
    transformers.logging.set_verbosity_error()
    generator = double(1)
    torch.manual_seed(0)
    net, rows, names = built(kind, generator)
    net = net.double().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = DataLoader(TensorDataset(*rows), 7)
    for _, batch in zip(range(steps), loader if mistake else lockstep.shard(loader), strict=False):
        model(**dict(zip(names, batch, strict=True))).loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
