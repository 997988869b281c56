"""A recurrent language model on packed sequences of different lengths, whose loss is a mean over words."""

import torch
import torch.nn.functional as F
from options import double, program, rows_of
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import lockstep

MISTAKES = {"mean_of_means": "mean of means"}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 12, 2), nn.Linear(12, 20)

    def forward(self, packed):
        embedded = packed._replace(data=self.words(packed.data))
        return self.head(self.rnn(embedded)[0].data)


def main(zero=0, mistake=None, compiled=0, steps=5):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    net = Network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    for _ in range(steps):
        rows = torch.randint(20, (7, 9), generator=generator)
        lengths = torch.randint(2, 9, (7,), generator=generator)
        mine, counts = rows_of(world, rows, lengths)
        texts = [row[: count + 1] for row, count in zip(mine, counts, strict=True)]
        given = pack_sequence([text[:-1] for text in texts], enforce_sorted=False)
        wanted = pack_sequence([text[1:] for text in texts], enforce_sorted=False).data
        loss = F.cross_entropy(model(given), wanted)
        lockstep.backward(loss, weight=None if mistake else len(wanted))
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
